"""Shortened requests of Claude Code 2.1: system messages in the conversation, titles by a schema, effort levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.calling import RECORD, answering
from tests.support.serving import MODEL, Served, serve
from tests.support.tool_formats import TOOLS
from tests.text.test_message_rules import SYSTEM_FIRST
from tools.fixtures.fake_engine import TOOL_TEMPLATE, fake_config, tiny_tokenizer

CONFIG = fake_config(max_model_len=8192, num_blocks=4096, max_num_batched_tokens=2048)
CACHED = {"cache_control": {"type": "ephemeral"}}
AGENTS = "Available agent types for the Agent tool:\n- Explore: reads."
FIRST: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-23.\n</system-reminder>\n\n"},
                {"type": "text", "text": "What is in hello.txt?", **CACHED},
            ],
        },
        {"role": "system", "content": AGENTS},
    ],
    "system": [{"type": "text", "text": "You are a Claude agent.", **CACHED}, {"type": "text", "text": "Be careful."}],
    "tools": [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS],
    "metadata": {"user_id": '{"device_id":"0"}'},
    "max_tokens": 3200,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
TITLE_SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


@pytest.fixture(scope="module", params=[TOOL_TEMPLATE, SYSTEM_FIRST], ids=["takes them", "refuses them"])
def calling(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Yield a server whose template accepts system messages anywhere, then one that accepts them only at the start."""
    with answering(RECORD.text, template=request.param, config=CONFIG) as served:
        yield served


def test_a_second_claude_code_turn_hits_the_cached_first_turn(calling: Served) -> None:
    """Both turns get an answer. The first turn's prompt is the cached prefix of the second."""
    first = calling.post("/v1/messages?beta=true", FIRST).json()
    assert first["stop_reason"] == "tool_use"
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "hello"} for call in calls]
    turns = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    more = [{"role": "system", "content": [{"type": "text", "text": "A file has changed.", **CACHED}]}]
    second = calling.post("/v1/messages?beta=true", {**FIRST, "messages": [*FIRST["messages"], *turns, *more]})
    assert second.status_code == 200
    num_prompt_tokens = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    assert second.json()["usage"]["cache_read_input_tokens"] >= num_prompt_tokens - CONFIG.cache.block_size


def test_system_message_text_keeps_the_position_in_the_conversation() -> None:
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)
    with serve(config=CONFIG, tokenizer=tokenizer) as served:
        body = {**FIRST, "tools": [], "max_tokens": 1}
        usage = served.post("/v1/messages", body).json()["usage"]
        messages = [
            {"role": "system", "content": "You are a Claude agent.\nBe careful."},
            {"role": "user", "content": "\n".join(part["text"] for part in FIRST["messages"][0]["content"])},
            {"role": "system", "content": AGENTS},
        ]
        assert usage["input_tokens"] == len(tokenizer.apply_chat_template(messages))
        given = {name: body[name] for name in ("model", "messages", "system", "thinking", "output_config")}
        assert served.post("/v1/messages/count_tokens", given).json()["input_tokens"] == usage["input_tokens"]
        first = {**body, "messages": [{"role": "system", "content": "x"}]}
        assert "messages[0].role" in served.post("/v1/messages", first).json()["error"]["message"]


def test_an_answer_by_a_schema(served: Served) -> None:
    """Claude Code asks for a session's title in this way."""
    config = {"effort": "high", "format": {"type": "json_schema", "schema": TITLE_SCHEMA}}
    body = {"model": MODEL, "max_tokens": 4, "messages": FIRST["messages"][:1], "tools": [], "output_config": config}
    assert served.post("/v1/messages", body).status_code == 200
    structured = served.runner.seen_params[-1].structured_outputs
    assert structured is not None and structured.json == TITLE_SCHEMA
    older = {**body, "output_format": config["format"]}
    assert served.post("/v1/messages", {**older, "output_config": {"effort": "high"}}).status_code == 200
    structured = served.runner.seen_params[-1].structured_outputs
    assert structured is not None and structured.json == TITLE_SCHEMA
    assert served.post("/v1/messages", older).status_code == 400
    for bad in ({"type": "text", "schema": TITLE_SCHEMA}, {"type": "json_schema"}, 5):
        response = served.post("/v1/messages", {**body, "output_config": {"format": bad}})
        assert response.status_code == 400 and "output_config" in response.json()["error"]["message"]


@pytest.mark.parametrize(("effort", "told"), [("low", "low"), ("high", "high"), ("max", "high"), (None, "")])
def test_output_config_effort_reaches_the_template_as_reasoning_effort(effort: str | None, told: str) -> None:
    tokenizer = tiny_tokenizer("{{ reasoning_effort }}:{{ messages[-1].content }}")
    with serve(config=CONFIG, tokenizer=tokenizer) as served:
        body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        usage = served.post("/v1/messages", {**body, "output_config": {"effort": effort}}).json()["usage"]
        assert usage["input_tokens"] == len(tokenizer.encode(f"{told}:hi"))


TOO_LONG = "prompt is too long: {} tokens > 8191 maximum"
TOO_LONG_TOGETHER = "input length and `max_tokens` exceed context limit: {} + 3200 > 8192, decrease input length or "
TOO_LONG_TOGETHER += "`max_tokens` and try again"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_characters", "expected"), [(8300, TOO_LONG), (6000, TOO_LONG_TOGETHER)])
def test_the_sizes_are_in_anthropics_words(calling: Served, num_characters: int, expected: str, stream: bool) -> None:
    """Claude Code reads the numbers. It then shortens the conversation, or reduces ``max_tokens``."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a" * num_characters}]}
    num_tokens = calling.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    body |= {"max_tokens": 3200, "stream": stream}
    response = calling.post("/v1/messages", body)
    assert response.status_code == 400
    problem = {"type": "invalid_request_error", "message": expected.format(num_tokens)}
    assert response.json() == {"type": "error", "error": problem}
    message = calling.post("/v1/chat/completions", body).json()["error"]["message"]
    assert "maximum context length" in message and str(num_tokens) in message


def test_an_overlong_prompt_gets_a_400_that_says_prompt_is_too_long(calling: Served) -> None:
    body = {"model": MODEL, "max_tokens": 3200, "messages": [{"role": "user", "content": "a" * 1_000_000}]}
    response = calling.post("/v1/messages", body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("prompt is too long: ") and "8192 tokens" in message
