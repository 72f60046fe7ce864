"""Responses that leave out the text of the reasoning. The usage still counts the reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from metal_engine.answers.answer_format import AnswerFormat
from tests.server.test_errors import sse_events
from tests.support.calling import USER, answering
from tests.support.serving import MODEL, Served
from tests.support.splitting import THINK

CHAT = "/v1/chat/completions"
HIDDEN: list[dict[str, Any]] = [
    {"include_reasoning": False},
    {"reasoning": {"exclude": True}},
    {"reasoning": {"exclude": True, "max_tokens": 50}, "include_reasoning": False},
]


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Served]:
    template = "{{ messages[0].content }}<think>\n"
    with answering("#\n</think>\n\n*", AnswerFormat(reasoning=THINK), template) as served:
        yield served


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("fields", HIDDEN)
def test_whole(reasoning: Served, fields: dict[str, Any]) -> None:
    body = {"messages": USER, "n": 2}
    shown = reasoning.post(CHAT, {**body, "include_reasoning": True}).json()
    hidden = reasoning.post(CHAT, {**body, **fields}).json()
    assert [choice["message"]["reasoning"] for choice in shown["choices"]] == ["#", "#"]
    messages = [choice["message"] for choice in hidden["choices"]]
    assert messages == [{"role": "assistant", "content": "*", "refusal": None}] * 2
    assert counts(hidden["usage"]) == counts(shown["usage"]) and counts(hidden["usage"])[1] > 0


@pytest.mark.parametrize("fields", HIDDEN)
def test_streams(reasoning: Served, fields: dict[str, Any]) -> None:
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    shown, hidden = (
        sse_events(reasoning.post(CHAT, {**body, **more}).text) for more in ({"reasoning": {"exclude": False}}, fields)
    )
    (of_shown, of_hidden) = (
        [choice["delta"] for event in events for choice in event["choices"]] for events in (shown, hidden)
    )
    assert "".join(delta.get("reasoning", "") for delta in of_shown) == "#"
    assert not any("reasoning" in delta or "reasoning_content" in delta for delta in of_hidden)
    assert "".join(delta.get("content", "") for delta in of_hidden) == "*"
    assert of_hidden[0]["role"] == "assistant" and hidden[-2]["choices"][0]["finish_reason"] == "stop"
    assert counts(hidden[-1]["usage"]) == counts(shown[-1]["usage"])


def test_a_limit_within_the_reasoning(reasoning: Served) -> None:
    answer = reasoning.post(CHAT, {"messages": USER, "max_tokens": 2, "include_reasoning": False}).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert counts(answer["usage"]) == (2, 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 100}),
        ("/api/chat", {"messages": USER, "stream": False}),
    ],
)
def test_other_apis(reasoning: Served, path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        body = {"model": MODEL, **body, "stream": stream}
        shown, hidden = (reasoning.post(path, {**body, "include_reasoning": value}).text for value in (True, False))
        assert "#" in shown and "#" not in hidden and "*" in hidden
    if path == "/v1/responses":
        assert "#" not in reasoning.post(path, {**body, "reasoning": {"exclude": True}}).text
