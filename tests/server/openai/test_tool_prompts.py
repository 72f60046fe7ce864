"""Tools over HTTP with a chat template that has no tools: prompt, response and later turns on every endpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from metal_engine.server.openai.template_messages import template_messages
from metal_engine.server.protocol import ChatMessage
from tests.support.calling import CLAUDE_TOOLS, CONFIG, RECORD, USER
from tests.support.chat_templates import MACROS
from tests.support.serving import MODEL, Served, serve
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import script, tiny_tokenizer

# Refuses the same messages as several published templates.
ALTERNATING = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] or (loop.index0 and "
    "m.role == messages[loop.index0 - 1].role) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    with serve(script(RECORD.text), config=CONFIG) as served:
        yield served


def test_chat_completions(calling: Served) -> None:
    client = calling.client()
    for choice in ({}, {"tool_choice": "auto"}):
        (answer,) = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, **choice).choices  # type: ignore[call-overload]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", RECORD.content)
        assert [(c.function.name, json.loads(c.function.arguments)) for c in answer.message.tool_calls] == RECORD.calls
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS) as stream:  # type: ignore[arg-type]
        message = stream.get_final_completion().choices[0].message
    assert message.content == RECORD.content and message.tool_calls is not None
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == RECORD.calls


def test_a_template_without_tools_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "metal_engine")
    with serve(script("x"), config=CONFIG) as served:
        for _ in range(3):
            served.post("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
        served.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": USER, "tools": CLAUDE_TOOLS})
    assert sum("takes no tools" in record.getMessage() for record in caplog.records) == 1


def prompt(served: Served, messages: list[Any], **more: Any) -> str:
    answer = served.post("/tokenize", {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return served.tokenizer.decode(answer.json()["tokens"])


def test_the_prompt_tells_of_the_tools(calling: Served) -> None:
    told = prompt(calling, [{"role": "system", "content": "Be brief."}, *USER], tools=TOOLS)
    assert told.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert all(json.dumps(tool["function"]) in told for tool in TOOLS) and "<tool_call>" in told
    assert "<tools>" not in prompt(calling, USER, tools=TOOLS, tool_choice="none")


CALLS = [
    {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    for i, (name, arguments) in enumerate(RECORD.calls)
]
CONVERSATION: list[Any] = [
    *USER,
    {"role": "assistant", "content": RECORD.content, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c0", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c1", "content": "at 9 <|im_end|>"},
    {"role": "user", "content": "and?"},
]
AS_TEXT = [
    *USER,
    {
        "role": "assistant",
        "content": RECORD.content
        + "".join(
            f'\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in RECORD.calls
        ),
    },
    {
        "role": "user",
        "content": "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nat 9 <|im_end|>\n</tool_response>\nand?",
    },
]


def test_calls_and_results_reach_the_prompt(calling: Served) -> None:
    """This holds also if a later turn offers no tools. Spellings of control tokens in results stay text."""
    expected = calling.tokenizer.apply_chat_template(AS_TEXT)
    assert calling.post("/tokenize", {"messages": CONVERSATION}).json()["tokens"] == expected
    assert len(expected) > len(calling.tokenizer.encode(calling.tokenizer.decode(expected)))
    assert calling.tokenizer.decode(expected[-200:]) in prompt(calling, CONVERSATION, tools=TOOLS)


@pytest.mark.parametrize("arguments", ["", "null", None])
def test_a_call_without_arguments(arguments: str | None) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [ChatMessage(role="assistant", tool_calls=[call])]
    (message,) = template_messages(messages, tokenizer=tiny_tokenizer(MACROS))
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    (message,) = template_messages(messages, tokenizer=tiny_tokenizer())
    assert message["content"] == f'<tool_call>\n{{"name": "f", "arguments": {arguments or "{}"}}}\n</tool_call>'


def test_arguments_that_are_not_an_object_are_refused_if_the_template_requires_one(calling: Served) -> None:
    """The token limit may have cut them off."""
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": '}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert '{"name": "now", "arguments": {"a": }' in prompt(calling, messages)
    with serve(tokenizer=tiny_tokenizer(MACROS)) as served:
        answer = served.post("/tokenize", {"messages": messages})
    assert answer.status_code == 400 and "messages[1].tool_calls[0].function.arguments" in answer.text


def test_arguments_stay_text_if_the_template_requires_it() -> None:
    """DeepSeek's templates append the arguments to a text."""
    template = "{% for c in messages[1].tool_calls %}{{ c.function.name + c.function.arguments }};{% endfor %}"
    with serve(tokenizer=tiny_tokenizer(template)) as served:
        calls = [{"id": "c", "function": {"name": "now", "arguments": text}} for text in ('{"a":1}', "")]
        assert prompt(served, [*USER, {"role": "assistant", "tool_calls": calls}]) == 'now{"a":1};now{};'


def test_calls_become_text_if_the_template_leaves_them_out() -> None:
    """As in DeepSeek R1's template."""
    template = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% else %}"
    template += "{{ m.content }}{% endif %}{% endfor %}"
    with serve(tokenizer=tiny_tokenizer(template)) as served:
        assert prompt(served, CONVERSATION) == "".join(message["content"] for message in AS_TEXT)


def test_messages_and_responses_render_tool_calls_to_the_same_prompt(calling: Served) -> None:
    turn = [{"type": "text", "text": RECORD.content}]
    turn += [
        {"type": "tool_use", "id": f"c{i}", "name": name, "input": arguments}
        for i, (name, arguments) in enumerate(RECORD.calls)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c0", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "at 9 <|im_end|>"}]},
        {"type": "text", "text": "and?"},
    ]
    messages = [*USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    body = {"model": MODEL, "max_tokens": 1, "messages": messages}
    expected = len(calling.tokenizer.apply_chat_template(AS_TEXT))
    assert calling.post("/v1/messages/count_tokens", body).json()["input_tokens"] == expected
    items: list[Any] = [*USER, {"role": "assistant", "content": RECORD.content}]
    items += [
        {"type": "function_call", "call_id": call["id"], **call["function"]}  # type: ignore[dict-item]
        for call in CALLS
    ]
    items += [
        {"type": "function_call_output", "call_id": "c0", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c1", "output": "at 9 <|im_end|>"},
        {"role": "user", "content": "and?"},
    ]
    usage = calling.post("/v1/responses", {"input": items, "max_output_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] == expected


@pytest.mark.parametrize("last", [4, 5])
def test_turns_alternate_if_the_template_requires_alternation(last: int) -> None:
    with serve(script("x"), config=CONFIG, tokenizer=tiny_tokenizer(ALTERNATING)) as served:
        text = prompt(served, CONVERSATION[:last], tools=TOOLS)
        assert text.count("<|im_start|>user") == 2 and ("and?" in text) == (last == 5)


def test_tool_calls_are_passed_to_templates_that_render_tool_calls() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %} {{ c.function.name }}{% endfor %};{% endfor %}"
    )
    with serve(script("x"), config=CONFIG, tokenizer=tiny_tokenizer(template)) as served:
        assert prompt(served, CONVERSATION) == "user;assistant get_weather find_trains;tool;tool;user;"


@pytest.mark.parametrize("call", [{}, {"function": 1}, {"function": {"name": 1}}, {"function": {"name": "x" * 257}}])
def test_calls_without_a_name_are_refused(calling: Served, call: dict[str, Any]) -> None:
    response = calling.post("/v1/chat/completions", {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages" and "messages[1].tool_calls[0].function.name" in error["message"]
