"""Tools and reasoning over HTTP with the official client: the prompt for the model, and the parsed response."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from tokenizers import AddedToken

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.checkpoints.answer_formats import CALL_SYNTAXES, find_answer_format
from metal_engine.errors import ConfigError
from metal_engine.sampling_params import SamplingParams
from metal_engine.server.logs import UniqueWarnings
from metal_engine.server.openai.chat import ChatEndpoint
from metal_engine.server.protocol import ChatCompletionBody
from metal_engine.settings.server_args import ServerArgs
from metal_engine.text.tokenizer import Tokenizer
from tests.server.test_errors import check_error
from tests.support.calling import RECORD, USER, answering
from tests.support.golden import GOLDEN_TOOLS, GoldenCase, calling_cases
from tests.support.serving import MODEL, Served, serve
from tests.support.splitting import THINK, answer_format
from tests.support.sweeps import sweep
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import TOOL_TEMPLATE, byte_ids, fake_config, generated, tiny_tokenizer

# Parsers whose streams differ: arguments as they are written, and whole calls.
QUICK = ("json_tools", "qwen3_coder")


def streamed(served: Served, **body: Any) -> tuple[dict[str, Any], str | None]:
    """Return a message added up from a stream's deltas, as clients do, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    reason = None
    for chunk in served.client().chat.completions.create(model=MODEL, messages=USER, stream=True, **body):
        (choice,) = chunk.choices
        delta = choice.delta
        assert reason is None, "a chunk after the last"
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning", None) or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.id is not None:
                assert call.index == len(message["calls"]) and call.type == "function"
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason
    return message, reason


@pytest.mark.parametrize("recorded", sweep(calling_cases(), lambda case: case.parser in QUICK), ids=str)
def test_every_format(recorded: GoldenCase) -> None:
    with answering(f"<think>\nhm\n</think>\n{recorded.text}", answer_format(recorded.parser)) as served:
        (choice,) = served.client().chat.completions.create(model=MODEL, messages=USER, tools=GOLDEN_TOOLS).choices
        message = choice.message
        assert message.content == recorded.content
        assert message.reasoning == message.reasoning_content == "hm"  # type: ignore[attr-defined]
        assert choice.finish_reason == "tool_calls" and message.tool_calls is not None
        assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == recorded.calls
        in_stream, reason = streamed(served, tools=GOLDEN_TOOLS)
        assert reason == "tool_calls"
        assert in_stream["content"] == (recorded.content or "")
        assert in_stream["reasoning"] == in_stream["reasoning_content"] == "hm"
        assert [(name, json.loads(arguments)) for name, arguments in in_stream["calls"]] == recorded.calls


# Parser -> text that starts like a call of that format but is not a call.
MALFORMED = {
    "json_tools": "Hm. <tool_call>\n{'name': get_weather}\n</tool_call> So be it.",
    "mistral": 'Hm. [TOOL_CALLS]get_weather[ARGS]{"city": So be it.',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_text(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "metal_engine")
    with answering(MALFORMED[name], answer_format(name)) as served:
        (choice,) = served.client().chat.completions.create(model=MODEL, messages=USER, tools=TOOLS).choices
        assert (choice.message.content, choice.finish_reason) == (MALFORMED[name], "stop")
        assert choice.message.tool_calls is None
        message, reason = streamed(served, tools=TOOLS)
        assert (message["content"], reason) == (MALFORMED[name], "stop")
        # A call that was sent in part before it proved malformed stays incomplete.
        assert message["calls"] == ([["get_weather", '{"city": ']] if name == "mistral" else [])
    assert len([r for r in caplog.records if "malformed" in r.getMessage()]) == 2


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    """Yield a server whose model calls two tools, without reasoning."""
    with answering(RECORD.text) as served:
        yield served


def test_the_template_is_shown_the_tools(plain: Served) -> None:
    for body, shown in [
        ({"tools": TOOLS}, TOOLS),
        ({"tools": TOOLS, "tool_choice": "auto"}, TOOLS),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": []}, None),
    ]:
        answer = plain.post("/tokenize", {"messages": USER, **body}).json()
        assert answer["tokens"] == plain.tokenizer.apply_chat_template(USER, tools=shown)
    # Without a choice of tools, calls are text.
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "none"}
    (choice,) = plain.post("/v1/chat/completions", body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (RECORD.text, "stop")
    assert "tool_calls" not in choice["message"]


def test_one_call_and_none(plain: Served) -> None:
    message, _ = streamed(plain, tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in message["calls"]] == ["get_weather"]
    message, reason = streamed(plain, tools=TOOLS, max_tokens=60)
    assert (message["calls"], message["content"], reason) == ([], RECORD.text[:60], "length")


def test_a_stop_string_within_an_argument() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n\nand more"
    with answering(text, answer_format("qwen3_coder")) as served:
        message, reason = streamed(served, tools=TOOLS, stop=["\n\n"])
        assert (message["calls"], message["content"], reason) == ([], text.partition("\n\n")[0], "stop")


def test_a_begun_call_that_is_none_in_other_endpoints() -> None:
    """The call stays incomplete, and is marked as incomplete if the endpoint has a field for that."""
    with answering(MALFORMED["mistral"], answer_format("mistral")) as served:
        tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        with served.client().responses.stream(model=MODEL, input="hi", tools=tools) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
        said, call, text = response.output
        assert response.status == "completed" and said.type == text.type == "message"
        assert call.type == "function_call"
        assert (call.status, call.arguments) == ("incomplete", '{"city": ')
        claude = anthropic.Anthropic(base_url=served.url, api_key="none")
        inputs: Any = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
        whole = claude.messages.create(model=MODEL, max_tokens=200, messages=USER, tools=inputs)
        assert [block.type for block in whole.content] == ["text"] and whole.stop_reason == "end_turn"
        with claude.messages.stream(model=MODEL, max_tokens=200, messages=USER, tools=inputs) as events:
            message = events.get_final_message()
        assert [block.type for block in message.content] == ["text", "tool_use", "text"]
        assert message.stop_reason == "end_turn"


NAMED = {"type": "function", "function": {"name": "find_trains"}}


def test_refused_choices(plain: Served) -> None:
    for body, param in [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ]:
        check_error(plain.post("/v1/chat/completions", {"messages": USER, **body}), 400, param)
    for auto, param in [(True, "tools"), (False, "tool_choice")]:
        args = ServerArgs(shutdown_timeout=1, enable_auto_tool_choice=auto)
        with answering("x", AnswerFormat(), args=args) as served:
            error = check_error(served.post("/v1/chat/completions", {"messages": USER, "tools": TOOLS}), 400, param)
            assert "--" in error["message"]


def test_a_forced_tool_choice_sets_the_structured_output_schema() -> None:
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)

    def schema(choice: Any, **more: Any) -> dict[str, Any]:
        body = ChatCompletionBody(messages=USER, tools=TOOLS, tool_choice=choice, **more)  # type: ignore[arg-type]
        served = SimpleNamespace(
            answer_format=AnswerFormat(), auto_tool_choice=True, tool_grammar="auto", warnings=UniqueWarnings()
        )
        conversation = ChatEndpoint(served)
        conversation.tokenize(body, tokenizer)
        wanted = conversation.adjust(SamplingParams()).structured_outputs
        assert wanted is not None and isinstance(wanted.json, dict)
        return wanted.json

    assert schema(NAMED) == TOOLS[1]["function"]["parameters"]
    required = schema("required")
    assert required["type"] == "array" and required["minItems"] == 1 and "maxItems" not in required
    names = [item["properties"]["name"] for item in required["items"]["anyOf"]]
    assert names == [{"const": "get_weather"}, {"const": "find_trains"}]
    assert schema("required", parallel_tool_calls=False)["maxItems"] == 1


# --- reasoning ---


def test_a_prompt_that_begins_the_reasoning() -> None:
    with answering(
        "hm\n</think>\n\nYes.", AnswerFormat(reasoning=THINK), "{{ messages[0].content }}<think>\n"
    ) as served:
        message, reason = streamed(served)
        assert (message["reasoning"], message["content"], reason) == ("hm", "Yes.", "stop")
        message, reason = streamed(served, max_tokens=2)
        assert (message["reasoning"], message["content"], reason) == ("hm", "", "length")


# Output, whether the template starts the reasoning, number of reasoning tokens: one per byte, with the marks.
@pytest.mark.parametrize(("text", "begun", "count"), [
    ("hm\n</think>\n\nYes.", True, len("hm\n</think>")),
    ("<think>hm</think>Yes.<think>é", False, len(">hm</think>") + len(">") + 2),
    ("No </think>.", False, 0),
])  # fmt: skip
def test_tokens_of_reasoning_are_counted(text: str, begun: bool, count: int) -> None:
    """A parser for tools and tools in the response do not change the count."""
    with answering(text, template="{{ tools }}{{ messages[0].content }}" + ("<think>\n" if begun else "")) as served:
        client = served.client()
        for tools in ([], TOOLS):
            whole = client.chat.completions.create(model=MODEL, messages=USER, n=2, tools=tools)
            *_, last = client.chat.completions.create(
                model=MODEL, messages=USER, n=2, tools=tools, stream=True, stream_options={"include_usage": True}
            )
            for usage in (whole.usage, last.usage):
                assert usage is not None and usage.completion_tokens_details is not None
                assert usage.completion_tokens_details.reasoning_tokens == 2 * count
        response = client.responses.create(model=MODEL, input="hi")
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == count
        claude = anthropic.Anthropic(base_url=served.url, api_key="none")
        message = claude.messages.create(model=MODEL, max_tokens=100, messages=USER)
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == count
        plain = client.completions.create(model=MODEL, prompt="a", max_tokens=100).usage
        assert plain is not None and plain.completion_tokens_details is not None
        assert plain.completion_tokens_details.reasoning_tokens == 0


def test_stop_strings_begin_after_the_reasoning() -> None:
    count = len(">hm</think>")
    options = {"include_usage": True, "continuous_usage_stats": True}
    with answering("<think>hm</think>Yes.", AnswerFormat(reasoning=THINK)) as served:
        create = served.client().chat.completions.create
        for stop, content in (("Yes", ""), ("m</", "Yes."), ("</think>Y", "Yes."), ("s.", "Ye")):
            body: dict[str, Any] = {"model": MODEL, "messages": USER, "stop": stop}
            whole = create(**body)
            message, usage = whole.choices[0].message, whole.usage
            assert (message.reasoning, message.content) == ("hm", content)
            assert usage.completion_tokens_details.reasoning_tokens == count
            chunks = create(**body, stream=True, stream_options=options)
            counts = [chunk.usage.completion_tokens_details.reasoning_tokens or 0 for chunk in chunks]
            assert counts == sorted(counts) and counts[-1] == count


def test_a_long_message_is_continued_within_or_after_its_reasoning() -> None:
    long = "<think>" + "hm " * 100
    with answering("Yes.</think>No.", AnswerFormat(reasoning=THINK)) as served:
        for begun, reasoning, content in ((long, "Yes.", "No."), (f"{long}</think>" + "so " * 100, None, "Yes.No.")):
            messages = [*USER, {"role": "assistant", "content": begun}]
            body = {"messages": messages, "continue_final_message": True}
            message = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]
            assert (message.get("reasoning"), message["content"]) == (reasoning, content)


def test_responses_without_tools_have_no_tool_fields(served: Served) -> None:
    message = served.post("/v1/chat/completions", {"messages": USER, "max_tokens": 5}).json()["choices"][0]["message"]
    assert message.keys() == {"role", "content", "refusal"}


# --- what the tokenizer says ---


def tokenizer_with(*tokens: str, special: bool = False, template: str = "") -> Any:
    hf = tiny_tokenizer(template or None).hf_tokenizer
    hf.add_tokens([AddedToken(token, special=special) for token in tokens], special_tokens=special)
    return hf


DEEPSEEK_V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ tool.type }}<｜tool▁sep｜>{{ tool.name }}\n```json\n"
LLAMA3 = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
DEEPSEEK_V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ tool.name }}<｜tool▁sep｜>{{ tool.arguments }}"


def test_parsers_are_chosen_from_the_tokenizer() -> None:
    hermes = "{% if tools %}<tool_call>{{ tool_call.name }}{% endif %}"
    for hf, tool, marks, special in [
        (tokenizer_with(), None, None, False),
        (tokenizer_with(template=hermes), "<tool_call>", None, False),
        (tokenizer_with("<think>", "</think>"), None, ("<think>", "</think>"), False),
        (tokenizer_with("[THINK]", "[/THINK]", special=True), None, ("[THINK]", "[/THINK]"), True),
        (tokenizer_with("[TOOL_CALLS]", template="{{ tools }}[TOOL_CALLS]", special=True), "[TOOL_CALLS]", None, True),
        (tokenizer_with("<|tool_call_start|>", "<|tool_call_end|>"), "<|tool_call_start|>", None, False),
        (tokenizer_with("｜DSML｜"), "<｜DSML｜function_calls>", None, False),
        (tokenizer_with("｜DSML｜", template="<｜DSML｜tool_calls>"), "<｜DSML｜tool_calls>", None, False),
        (tokenizer_with(template=DEEPSEEK_V3), None, None, False),
        (tokenizer_with("<|python_tag|>", template=LLAMA3, special=True), "<|python_tag|>", None, True),
        (tokenizer_with("<|python_start|>", "<|header_start|>", special=True), "<|python_start|>", None, True),
        (tokenizer_with("<|python_start|>", special=True), None, None, False),
        (tokenizer_with(template="<function_calls>{{ calls }}</function_calls>"), "<function_calls>", None, False),
        (tokenizer_with(template="<function_calls><invoke name="), None, None, False),
    ]:
        chosen = find_answer_format(hf)
        assert (None if chosen.tool is None else chosen.tool.tool_call_start) == tool
        assert (chosen.reasoning and (chosen.reasoning.start, chosen.reasoning.end)) == marks
        assert chosen.special == special
    for template, name in ((DEEPSEEK_V3, "deepseek_v3"), (DEEPSEEK_V31, "deepseek_v31")):
        found = find_answer_format(tokenizer_with("<｜tool▁calls▁begin｜>", template=template))
        assert found.syntax is CALL_SYNTAXES[name]
    named = find_answer_format(tokenizer_with(), "hermes", "qwen3")
    assert named.tool is not None and named.tool.tool_call_start == "<tool_call>" and named.reasoning == THINK
    qwen = find_answer_format(tokenizer_with("<think>", "</think>"), model_type="qwen3_moe")
    assert qwen.reasoning is not None and qwen.reasoning.budget_text.strip().startswith("Considering")
    off = find_answer_format(tokenizer_with("<think>", "</think>", template=hermes), "none", "none")
    assert off == AnswerFormat(finds_calls=False)
    for wrong in (("qwen3", "auto"), ("auto", "hermes")):
        with pytest.raises(ConfigError, match="there is no such format"):
            find_answer_format(tokenizer_with(), *wrong)


def test_marks_that_are_special_tokens_are_seen() -> None:
    """Text without special tokens would lack the marks. A plain completion still has none."""
    hf_tokens = tokenizer_with("[THINK]", "[/THINK]", special=True)
    tokenizer = Tokenizer(hf_tokens)
    begin, end = tokenizer.encode("[THINK]"), tokenizer.encode("[/THINK]")
    assert len(begin) == len(end) == 1
    answer = [*begin, *byte_ids("hm"), *end, *byte_ids("Yes")]
    eos = min(tokenizer.eos_token_ids)

    def next_token(tokens: list[int], num_prompt_tokens: int) -> int:
        at = len(tokens) - num_prompt_tokens
        return answer[at] if at < len(answer) else eos

    hf_tokens.chat_template = TOOL_TEMPLATE
    known = find_answer_format(hf_tokens)
    assert generated([1], 2, next_token) == answer[:2]
    config = fake_config()
    config = replace(config, model=replace(config.model, vocab_size=len(hf_tokens)))
    with serve(next_token, tokenizer=tokenizer, answer_format=known, config=config) as served:
        message, _ = streamed(served)
        assert (message["reasoning"], message["content"]) == ("hm", "Yes")
        assert served.post("/v1/completions", {"prompt": "a"}).json()["choices"][0]["text"] == "hmYes"
