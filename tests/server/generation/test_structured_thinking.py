"""Structured output of a model that reasons: it follows the reasoning on every endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.output_phases import ReasoningPhase
from tests.support.calling import USER, answering
from tests.support.serving import MODEL, Served
from tests.support.tool_formats import TOOLS

REASONING = "hm\n</think>\n\n"
ANSWER = '{"a": 1}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
INSIDE = ReasoningPhase("<think>", "</think>", begins_inside=True)
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'tools' if tools }}<think>\n"


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    with answering(REASONING + ANSWER, template=TEMPLATE) as served:
        yield served


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON of each line or event of a stream."""
    response = served.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def whole(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = served.post(path, {**body, "stream": False})
    assert response.status_code == 200, response.text
    return dict(response.json())


def check_params(served: Served, number: int) -> None:
    """Check the sampling parameters of the last requests: a grammar that begins after the reasoning."""
    for params in served.runner.seen_params[-number:]:
        assert params.structured_outputs is not None and params.phases is not None
        assert params.phases.reasoning is not None and params.phases.reasoning == INSIDE


def test_forced_calls() -> None:
    arguments = '{"city": "Rome"}'
    with answering(f'{REASONING}[{{"name": "find_trains", "parameters": {arguments}}}]', template=TEMPLATE) as served:
        body = {"model": MODEL, "messages": USER, "tools": TOOLS, "tool_choice": "required"}
        (answer,) = whole(served, "/v1/chat/completions", body)["choices"]
        message = answer["message"]
        assert (message["content"], message["reasoning"]) == (None, "hm")
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "find_trains", "arguments": arguments}]
        deltas = [c["choices"][0]["delta"] for c in events(served, "/v1/chat/completions", body) if c["choices"]]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm"
        streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(function["arguments"] for function in streamed) == arguments
        check_params(served, 2)


def test_without_reasoning_the_grammar_is_there_from_the_first_token() -> None:
    """The template closes the reasoning, or the model does not reason."""
    closed = TEMPLATE.replace("<think>\n", "<think>\n\n</think>\n\n")
    for template, known in ((closed, None), (TEMPLATE, AnswerFormat())):
        with answering(ANSWER, known, template) as served:
            body = {"model": MODEL, "messages": USER, "response_format": JSON_SCHEMA}
            (choice,) = whole(served, "/v1/chat/completions", body)["choices"]
            assert (choice["message"]["content"], choice["message"].get("reasoning")) == (ANSWER, None)
            assert served.runner.seen_params[-1].phases is None


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
@pytest.mark.parametrize("constraint", [
    {"response_format": JSON_SCHEMA},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": r"\{.*\}"}},
    {"structured_outputs": {"choice": [ANSWER, "no"]}},
], ids=["schema", "object", "regex", "choice"])  # fmt: skip
def test_chat_completions(thinking: Served, constraint: dict[str, Any], more: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": USER, **constraint, **more}
    answer = whole(thinking, "/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["message"].get("reasoning")) == (ANSWER, "hm")
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm\n</think>")
    deltas = [c["choices"][0]["delta"] for c in events(thinking, "/v1/chat/completions", body) if c["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm"
    check_params(thinking, 2)


def test_cut_off_within_the_reasoning(thinking: Served) -> None:
    body = {"model": MODEL, "messages": USER, "response_format": JSON_SCHEMA, "max_tokens": 2}
    (choice,) = whole(thinking, "/v1/chat/completions", body)["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "")
    assert choice["finish_reason"] == "length"


def test_responses(thinking: Served) -> None:
    body = {"model": MODEL, "input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    answer = whole(thinking, "/v1/responses", body)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"] == ANSWER
    deltas = [e["delta"] for e in events(thinking, "/v1/responses", body) if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER
    check_params(thinking, 2)


def test_messages(thinking: Served) -> None:
    output_format = {"type": "json_schema", "schema": SCHEMA}
    body = {"model": MODEL, "messages": USER, "max_tokens": 100, "output_config": {"format": output_format}}
    answer = whole(thinking, "/v1/messages", body)
    blocks = [(block["type"], block.get("text", block.get("thinking"))) for block in answer["content"]]
    assert blocks == [("thinking", "hm"), ("text", ANSWER)]
    deltas = [e["delta"] for e in events(thinking, "/v1/messages", body) if e["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER
    check_params(thinking, 2)


@pytest.mark.parametrize("given", [SCHEMA, "json"], ids=["schema", "json"])
def test_ollama(thinking: Served, given: Any) -> None:
    for path, fields, text in (
        ("/api/chat", {"messages": USER}, lambda answer: answer["message"]["content"]),
        ("/api/generate", {"prompt": "hi"}, lambda answer: answer["response"]),
    ):
        body = {"model": MODEL, "format": given, **fields}
        assert text(whole(thinking, path, body)) == ANSWER
        assert "".join(map(text, events(thinking, path, body))) == ANSWER
    check_params(thinking, 4)
