"""Anthropic's /v1/messages, driven by the official client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from metal_engine.server.anthropic import protocol
from metal_engine.server.errors import APIError
from metal_engine.settings.server_args import ServerArgs
from tests.support.calling import CLAUDE_TOOLS, RECORD, USER, answering
from tests.support.serving import DEADLINE, MODEL, Served, serve
from tools.fixtures.fake_engine import generated, script


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
    cached = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + cached == len(served.tokenizer.apply_chat_template(chat))
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
        served.wait_until_idle()


OK: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": USER}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "model"),
    ({"model": MODEL, "messages": USER}, "max_tokens"),
    ({**OK, "max_tokens": 0}, "max_tokens"),
    ({**OK, "messages": []}, "messages"),
    ({**OK, "messages": [{"role": "system", "content": "x"}]}, "messages"),
    ({**OK, "messages": [{"role": "user", "content": [{}]}]}, "messages"),
    ({**OK, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({**OK, "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages"),
    ({**OK, "system": [{"type": "image"}]}, "system"),
    ({**OK, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
    ({**OK, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({**OK, "stop_sequences": [""]}, "stop_sequences"),
    ({**OK, "temperature": -1}, "temperature"),
    ({**OK, "n": 3}, "n must be 1"),
    ({**OK, "n": 3, "stream": True}, "n must be 1"),
    ({**OK, "container": "container_1"}, "container"),
    ({**OK, "mcp_servers": [{"type": "url", "url": "https://example.org", "name": "a"}]}, "mcp_servers"),
    ({**OK, "compaction": {"type": "summarize"}}, "compaction"),
    ({**OK, "thread": {"type": "create"}}, "thread"),
    ({**OK, "logprobs": True}, "logprobs"),
    ({**OK, "allowed_token_ids": [5, 2**63]}, "allowed_token_ids"),
    ({**OK, "output_format": {"type": "text"}}, "output_format"),
]


@pytest.mark.parametrize(("body", "named"), BAD)
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
        guarded.wait_until_idle()


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


def test_a_turn_keeps_all_of_its_reasoning() -> None:
    """With interleaved thinking, a turn can have several blocks."""
    blocks = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("First.", "", "Then.")]
    messages = [*USER, {"role": "assistant", "content": [*blocks, {"type": "text", "text": "So."}]}]
    body = protocol.CountTokensBody.model_validate({"model": MODEL, "messages": messages})
    turn = protocol.to_chat(body).messages[-1]
    assert (turn.reasoning, turn.content) == ("First.\n\nThen.", "So.")
