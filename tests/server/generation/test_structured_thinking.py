"""Structured output if the chat template starts the reasoning: the output is content on every endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import MODEL, Served, serve
from tests.support.splitting import answer_format
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import fake_config, script, tiny_tokenizer

ANSWER = '{"a": 1}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
USER = [{"role": "user", "content": "hi"}]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'tools' if tools }}<think>\n"
CONFIG = fake_config(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=2048)


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    known = answer_format("json_tools")
    with serve(script(ANSWER), config=CONFIG, tokenizer=tiny_tokenizer(TEMPLATE), answer_format=known) as served:
        yield served
        served.wait_until_idle()


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON of each line or event of a stream."""
    with httpx.stream("POST", f"{served.url}{path}", json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def whole(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = served.post(path, {**body, "stream": False})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": JSON_SCHEMA},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": r"\{.*\}"}},
    ],
    ids=["schema", "object", "regex"],
)
def test_chat_completions(thinking: Served, constraint: dict[str, Any], more: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": USER, **constraint, **more}
    answer = whole(thinking, "/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["message"].get("reasoning")) == (ANSWER, None)
    assert choice["finish_reason"] == "stop"
    deltas = [c["choices"][0]["delta"] for c in events(thinking, "/v1/chat/completions", body) if c["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    assert not any(delta.get("reasoning") for delta in deltas)


def test_without_a_grammar_the_text_is_reasoning(thinking: Served) -> None:
    answer = whole(thinking, "/v1/chat/completions", {"model": MODEL, "messages": USER})
    assert answer["choices"][0]["message"]["reasoning"] == ANSWER


def test_responses(thinking: Served) -> None:
    body = {"model": MODEL, "input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    answer = whole(thinking, "/v1/responses", body)
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["output"][0]["content"][0]["text"] == ANSWER
    deltas = [e["delta"] for e in events(thinking, "/v1/responses", body) if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER


def test_messages(thinking: Served) -> None:
    output_format = {"type": "json_schema", "schema": SCHEMA}
    body = {"model": MODEL, "messages": USER, "max_tokens": 100, "output_config": {"format": output_format}}
    answer = whole(thinking, "/v1/messages", body)
    assert [(block["type"], block.get("text")) for block in answer["content"]] == [("text", ANSWER)]
    deltas = [e["delta"] for e in events(thinking, "/v1/messages", body) if e["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == ANSWER


@pytest.mark.parametrize("given", [SCHEMA, "json"], ids=["schema", "json"])
def test_ollama(thinking: Served, given: Any) -> None:
    for path, fields, text in (
        ("/api/chat", {"messages": USER}, lambda answer: answer["message"]["content"]),
        ("/api/generate", {"prompt": "hi"}, lambda answer: answer["response"]),
    ):
        body = {"model": MODEL, "format": given, **fields}
        assert text(whole(thinking, path, body)) == ANSWER
        assert "".join(map(text, events(thinking, path, body))) == ANSWER
