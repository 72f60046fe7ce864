"""Anthropic's /v1/messages, driven by the official client, and its number of tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from metal_engine.server.anthropic import protocol
from metal_engine.server.errors import APIError
from metal_engine.settings.server_args import ServerArgs
from tests.support.calling import CLAUDE_TOOLS, RECORD, USER, answering
from tests.support.chat_templates import QWEN
from tests.support.serving import DEADLINE, MODEL, Served, serve
from tests.support.splitting import answer_format
from tests.support.sweeps import sweep
from tools.fixtures.fake_engine import CHAT_TEMPLATE, TOOL_TEMPLATE, fake_config, generated, script, tiny_tokenizer


def client(served: Served, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=DEADLINE)


def expected_text(served: Served, messages: list[dict[str, str]], num_tokens: int) -> str:
    return "".join(map(chr, generated(served.tokenizer.apply_chat_template(messages), num_tokens)))


def test_message(served: Served) -> None:
    message = client(served).messages.create(model=MODEL, max_tokens=20, system="Be brief.", messages=USER)
    chat = [{"role": "system", "content": "Be brief."}, *USER]
    (block,) = message.content
    assert block.type == "text" and block.text == expected_text(served, chat, 20)
    assert (message.role, message.stop_reason, message.model) == ("assistant", "max_tokens", MODEL)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(served.tokenizer.apply_chat_template(chat))
    assert usage.output_tokens == 20


def test_stream(served: Served) -> None:
    with client(served).messages.stream(model=MODEL, max_tokens=30, messages=USER) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    (block,) = message.content
    assert block.type == "text" and block.text == expected_text(served, USER, 30)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 30


def test_blocks(calling: Served) -> None:
    message = client(calling).messages.create(model=MODEL, max_tokens=1000, messages=USER, tools=CLAUDE_TOOLS)
    with client(calling).messages.stream(model=MODEL, max_tokens=1000, messages=USER, tools=CLAUDE_TOOLS) as stream:
        in_stream = stream.get_final_message()
    for one in (message, in_stream):
        assert one.stop_reason == "tool_use"
        thinking, text, *calls = one.content
        assert thinking.type == "thinking" and thinking.thinking == "hm"
        assert text.type == "text" and text.text == RECORD.content
        assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == RECORD.calls
    raw = httpx.post(
        calling.url + "/v1/messages",
        json={"model": MODEL, "max_tokens": 1000, "messages": USER, "tools": CLAUDE_TOOLS, "stream": True},
    ).text
    for event in raw.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_prefill_is_continued(served: Served) -> None:
    messages: list[Any] = [*USER, {"role": "assistant", "content": "Well,"}]
    message = client(served).messages.create(model=MODEL, max_tokens=10, messages=messages)
    ids = served.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,")
    assert message.content[0].text == "".join(map(chr, generated(ids, 10)))  # type: ignore[union-attr]


def test_stop_sequences() -> None:
    with serve(script("one two three")) as served:
        for stop, text, reason in ((["two"], "one ", "stop_sequence"), (["four"], "one two three", "end_turn")):
            more = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
            message = client(served).messages.create(
                model=MODEL, max_tokens=50, messages=USER, stop_sequences=stop, extra_body=more
            )
            assert message.content[0].text == text and message.stop_reason == reason  # type: ignore[union-attr]
            assert message.stop_sequence == (stop[0] if reason == "stop_sequence" else None)
        params = served.runner.seen_params[-1]
        assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.9)


OK: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": USER}


BAD_FIELDS: dict[str, list[Any]] = {
    "messages": [[], [{"role": "system", "content": "x"}], [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}]],
    "max_tokens": [0], "system": [[{"type": "image"}]], "tools": [[{"type": "bash_20250124", "name": "bash"}]],
    "tool_choice": [{"type": "tool"}], "stop_sequences": [[""]], "temperature": [-1], "container": ["container_1"],
    "mcp_servers": [[{"type": "url", "url": "https://example.org", "name": "a"}]], "thread": [{"type": "create"}],
    "compaction": [{"type": "summarize"}], "logprobs": [True], "allowed_token_ids": [[5, 2**63]],
    "output_format": [{"type": "text"}],
}  # fmt: skip


@pytest.mark.parametrize(("body", "named"), [
    ({}, "model"),
    ({"model": MODEL, "messages": USER}, "max_tokens"),
    ({**OK, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({**OK, "n": 3}, "n must be 1"),
    ({**OK, "n": 3, "stream": True}, "n must be 1"),
    *(({**OK, field: value}, field) for field, values in BAD_FIELDS.items() for value in values),
])  # fmt: skip
def test_bad_requests(served: Served, body: dict[str, Any], named: str) -> None:
    response = served.post("/v1/messages", body)
    assert response.status_code == 400
    answer = response.json()
    assert answer.keys() == {"type", "error"} and answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error" and named in answer["error"]["message"]


def test_errors_are_anthropics(served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError) as info:
        client(served).messages.create(model="other", max_tokens=5, messages=USER)
    assert info.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with serve(args=ServerArgs(api_key="sesame"), step_time=0.002) as guarded:
        assert client(guarded, "sesame").messages.create(model=MODEL, max_tokens=5, messages=USER).content
        with pytest.raises(anthropic.AuthenticationError):
            client(guarded, "other").messages.create(model=MODEL, max_tokens=5, messages=USER)
        guarded.runner.error_for = lambda tokens: RuntimeError("no more")
        with (
            pytest.raises(anthropic.APIStatusError, match="no more"),
            client(guarded, "sesame").messages.stream(model=MODEL, max_tokens=400, messages=USER) as stream,
        ):
            list(stream)


def test_odd_outputs() -> None:
    """Only a model that ignores the grammar of forced calls writes arguments that are not an object."""
    text = "é 日本語 😀\u2028 done"
    with answering(text) as served:
        name = CLAUDE_TOOLS[0]["name"]
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "日本"}]}
        with client(served).messages.stream(**body) as stream:
            assert "".join(stream.text_stream) == text
        message = client(served).messages.create(**body, tools=CLAUDE_TOOLS, tool_choice={"type": "tool", "name": name})
        assert [(block.name, block.input) for block in message.content if block.type == "tool_use"] == [(name, {})]


def test_too_many_tools_are_refused_before_all_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[int] = []
    convert = protocol._tool

    def counted(i: int, tool: protocol.AnthropicTool) -> dict[str, Any]:
        converted.append(i)
        return convert(i, tool)

    monkeypatch.setattr(protocol, "_tool", counted)
    tools = [{"name": f"tool_{i}", "input_schema": {"type": "object"}} for i in range(10_000)]
    body = protocol.CountTokensBody.model_validate({"model": MODEL, "messages": USER, "tools": tools})
    with pytest.raises(APIError, match="characters together"):
        protocol.to_chat(body)
    assert len(converted) < 5_000


def test_thinking_blocks_of_one_turn_are_joined_into_the_reasoning() -> None:
    """With interleaved thinking, a turn can have several blocks."""
    blocks = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("First.", "", "Then.")]
    messages = [*USER, {"role": "assistant", "content": [*blocks, {"type": "text", "text": "So."}]}]
    body = protocol.CountTokensBody.model_validate({"model": MODEL, "messages": messages})
    turn = protocol.to_chat(body).messages[-1]
    assert (turn.reasoning, turn.content) == ("First.\n\nThen.", "So.")


CONFIG = fake_config(max_model_len=8192, num_blocks=2048, max_num_batched_tokens=2048)
# Shared, because making a client takes longer than most requests.
HTTP = httpx.Client(timeout=DEADLINE)
# A template that begins reasoning in the prompt, and one that shows an effort.
THINKING = CHAT_TEMPLATE + (
    "{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
EFFORT = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}\n{% endif %}" + TOOL_TEMPLATE
TEMPLATES = {"plain": CHAT_TEMPLATE, "tools": TOOL_TEMPLATE, "qwen": QWEN, "thinking": THINKING, "effort": EFFORT}

CALL = {"type": "tool_use", "id": "t0", "name": CLAUDE_TOOLS[0]["name"], "input": {"city": "Paris"}}
CONVERSATIONS: list[list[Any]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t0", "content": "sunny"}]},
    ],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}],
]
SYSTEMS = [None, "Be brief.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]]
THINKINGS = [None, {"type": "enabled", "budget_tokens": 1}, {"type": "disabled"}, {"type": "adaptive"}]
NAME = CLAUDE_TOOLS[1]["name"]
CHOICES: list[Any] = [
    *(None, {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}),
    *({"type": "tool", "name": NAME}, {"type": "none"}),
]


@pytest.fixture(scope="module", params=sweep(TEMPLATES, lambda name: name in ("tools", "thinking")))
def templated(request: pytest.FixtureRequest) -> Iterator[Served]:
    tokenizer = tiny_tokenizer(TEMPLATES[request.param])
    with serve(config=CONFIG, tokenizer=tokenizer, answer_format=answer_format("json_tools")) as served:
        yield served


def post(served: Served, path: str, body: Any) -> httpx.Response:
    return HTTP.post(served.url + path, json=body)


def check(served: Served, **fields: Any) -> int:
    """Check that both endpoints count the same tokens, and return their number."""
    given = {name: value for name, value in fields.items() if value is not None}
    counted = post(served, "/v1/messages/count_tokens", {"model": MODEL, **given})
    assert counted.status_code == 200, counted.text
    answered = post(served, "/v1/messages", {"model": MODEL, "max_tokens": 2, **given})
    assert answered.status_code == 200, answered.text
    usage = answered.json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    return counted.json()["input_tokens"]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_conversations(templated: Served, messages: list[Any]) -> None:
    settings = itertools.product((None, CLAUDE_TOOLS), THINKINGS)
    for system, (tools, thinking) in zip(itertools.cycle(SYSTEMS), settings, strict=False):
        check(templated, messages=messages, system=system, thinking=thinking, tools=tools)


@pytest.mark.parametrize("choice", CHOICES)
def test_tool_choices(templated: Served, choice: dict[str, Any] | None) -> None:
    for thinking in THINKINGS[1:3]:
        more = {"messages": CONVERSATIONS[0], "system": "Be brief.", "thinking": thinking}
        with_tools = check(templated, tools=CLAUDE_TOOLS, tool_choice=choice, **more)
        assert (with_tools == check(templated, **more)) == (choice == {"type": "none"})


def test_efforts_and_formats(templated: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for effort, thinking in (("low", None), ("max", THINKINGS[1])):
        config = {"effort": effort, "format": {"type": "json_schema", "schema": schema}}
        check(templated, messages=CONVERSATIONS[0], output_config=config, thinking=thinking)


def test_the_settings_matter() -> None:
    """Otherwise, equal numbers would say little."""
    with serve(config=CONFIG, tokenizer=tiny_tokenizer(THINKING)) as served:
        on, off = (check(served, messages=CONVERSATIONS[0], thinking=thinking) for thinking in THINKINGS[1:3])
        assert off > on
    with serve(config=CONFIG, tokenizer=tiny_tokenizer(EFFORT)) as served:
        low, high = (
            check(served, messages=CONVERSATIONS[0], output_config={"effort": effort}) for effort in ("low", "high")
        )
        assert high == low + 1


@pytest.mark.parametrize(("fields", "name"), [
    ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "nothing"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"thinking": {"type": "sometimes"}}, "thinking"),
    ({"system": [{"type": "image"}]}, "system"),
])  # fmt: skip
def test_count_tokens_returns_the_same_errors_as_messages(templated: Served, fields: dict[str, Any], name: str) -> None:
    body = {"model": MODEL, "messages": CONVERSATIONS[0], **fields}
    counted = post(templated, "/v1/messages/count_tokens", body)
    answered = post(templated, "/v1/messages", {**body, "max_tokens": 2})
    assert counted.status_code == answered.status_code == 400
    assert counted.json() == answered.json() and name in counted.json()["error"]["message"]
