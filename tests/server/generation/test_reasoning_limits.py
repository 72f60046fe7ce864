"""Limits of the reasoning in each API: sampling parameters, template variables and errors. Reasoning that is hidden."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.output_phases import OutputPhases, ReasoningPhase
from tests.server.test_errors import check_error, sse_events
from tests.support.calling import USER, answering
from tests.support.serving import MODEL, Served, serve
from tests.support.splitting import THINK
from tools.fixtures.fake_engine import echo, fake_config, script, tiny_tokenizer

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
CONFIG = fake_config(max_model_len=512)
KNOWN = AnswerFormat(reasoning=THINK)
# The prompt ends within the reasoning, or after it if reasoning is off.
SWITCH = "{{ messages[0].content }}<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
# Own fields of each API.
OWN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 100},
    OLLAMA: {"messages": USER, "stream": False},
}


@pytest.fixture(scope="module")
def always() -> Iterator[Served]:
    """Yield a server whose template always begins the reasoning."""
    tokenizer = tiny_tokenizer("{{ messages[0].content }}<think>\n")
    with serve(script("</think>Yes."), config=CONFIG, tokenizer=tokenizer, answer_format=KNOWN) as served:
        yield served


@pytest.fixture(scope="module")
def switched() -> Iterator[Served]:
    """Yield a server whose template can turn the reasoning off."""
    with serve(script("</think>Yes."), config=CONFIG, tokenizer=tiny_tokenizer(SWITCH), answer_format=KNOWN) as served:
        yield served


def sent(served: Served, path: str, body: dict[str, Any]) -> OutputPhases | None:
    """Send a request. Return the phases that reach the engine."""
    response = served.post(path, {"model": MODEL, **OWN[path], **body})
    assert response.status_code == 200, response.text
    return served.runner.seen_params[-1].phases


def phases(budget: int) -> OutputPhases:
    return OutputPhases(ReasoningPhase("<think>", "</think>", begins_inside=True, budget=budget))


LIMITS = [
    (CHAT, {"thinking_token_budget": 7}, 7),
    (CHAT, {"reasoning": {"max_tokens": 7}}, 7),
    (CHAT, {"reasoning": {"max_tokens": 7, "effort": "low", "enabled": True, "exclude": False}}, 7),
    (CHAT, {"thinking_budget": 7}, 7),
    (CHAT, {"enable_thinking": True, "thinking_budget": 7}, 7),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    (RESPONSES, {"thinking_budget": 7}, 7),
    (RESPONSES, {"reasoning": {"max_tokens": 7}}, 7),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    (CHAT, {"thinking_token_budget": 0}, 0),
    (CHAT, {"reasoning": {"enabled": False}}, 0),
    (CHAT, {"reasoning": {"effort": "none"}}, 0),
    (CHAT, {"reasoning_effort": "none"}, 0),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, 0),
    (CHAT, {"chat_template_kwargs": {"thinking": False}}, 0),
    (CHAT, {"enable_thinking": False}, 0),
    (CHAT, {"enable_thinking": False, "thinking_budget": 7}, 0),
    (CHAT, {"thinking_budget": 0}, 0),
    (CHAT, {"thinking": {"type": "disabled"}}, 0),
    (RESPONSES, {"enable_thinking": False}, 0),
    (RESPONSES, {"reasoning": {"effort": "none"}}, 0),
    (RESPONSES, {"reasoning": {"enabled": False}}, 0),
    (MESSAGES, {"thinking": {"type": "disabled"}}, 0),
    (OLLAMA, {"think": False}, 0),
]
NO_LIMITS = [
    (CHAT, {}),
    (CHAT, {"reasoning": {}}),
    (CHAT, {"reasoning": {"enabled": True}}),
    (CHAT, {"reasoning_effort": "high"}),
    (CHAT, {"enable_thinking": True}),
    (CHAT, {"thinking": {"type": "enabled"}}),
    (CHAT, {"thinking": {"type": "auto"}}),
    (RESPONSES, {"reasoning": {"effort": "high"}}),
    (MESSAGES, {"thinking": {"type": "enabled"}}),
    (MESSAGES, {"thinking": {"type": "adaptive"}}),
    (OLLAMA, {"think": True}),
]


@pytest.mark.parametrize(("path", "body", "budget"), LIMITS + [(*one, None) for one in NO_LIMITS])
def test_budgets(always: Served, switched: Served, path: str, body: dict[str, Any], budget: int | None) -> None:
    assert sent(always, path, body) == (None if budget is None else phases(budget))
    assert sent(switched, path, body) == (phases(budget) if budget else None)


def test_template_variables() -> None:
    with serve(echo, config=CONFIG, tokenizer=tiny_tokenizer("{{ enable_thinking }}|{{ reasoning_effort }}")) as served:
        for body, shown in [
            ({"reasoning": {"effort": "high"}}, "|high"),
            ({"reasoning": {"effort": "none"}}, "False|none"),
            ({"reasoning": {"max_tokens": 5}}, "True|"),
            ({"reasoning": {"max_tokens": 0}}, "False|"),
            ({"thinking": {"type": "enabled"}}, "True|"),
            ({"thinking": {"type": "adaptive"}}, "|"),
            ({"thinking": {"type": "disabled"}}, "False|"),
            ({"enable_thinking": True}, "True|"),
            ({"enable_thinking": False}, "False|"),
            ({"thinking_token_budget": 5}, "|"),
            ({"thinking_token_budget": 0}, "False|"),
            ({"thinking_token_budget": 0, "chat_template_kwargs": {"enable_thinking": True}}, "True|"),
        ]:
            assert served.post(CHAT, {"messages": USER, **body}).json()["choices"][0]["message"]["content"] == shown


def test_reasoning_options_set_the_thinking_variable_of_templates() -> None:
    """DeepSeek's templates have the variable ``thinking``."""
    with serve(echo, config=CONFIG, tokenizer=tiny_tokenizer("|{{ thinking }}")) as served:
        for body, shown in [
            ({}, ""),
            ({"reasoning_effort": "high"}, "True"),
            ({"reasoning_effort": "none"}, "False"),
            ({"thinking": {"type": "enabled"}}, "True"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "False"),
            ({"chat_template_kwargs": {"thinking": True}, "thinking_token_budget": 0}, "True"),
        ]:
            answer = served.post(CHAT, {"messages": USER, **body}).json()
            assert answer["choices"][0]["message"]["content"] == f"|{shown}"


@pytest.mark.parametrize(("path", "body", "where"), [
    (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget"),
    (CHAT, {"thinking_token_budget": 1.5}, "thinking_token_budget"),
    (CHAT, {"thinking_token_budget": True}, "thinking_token_budget"),
    (CHAT, {"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
    (CHAT, {"reasoning": {"max_tokens": "7"}}, "reasoning.max_tokens"),
    (CHAT, {"reasoning": {"max_tokens": 1}, "thinking_token_budget": 1}, "reasoning.max_tokens"),
    (CHAT, {"thinking_budget": -1}, "thinking_budget"),
    (CHAT, {"thinking_budget": 1, "thinking_token_budget": 1}, "thinking_budget and thinking_token_budget"),
    (CHAT, {"thinking_budget": 1, "thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    (CHAT, {"thinking": {"type": "on"}}, "thinking.type"),
    (CHAT, {"thinking": True}, "thinking"),
    (CHAT, {"enable_thinking": "no"}, "enable_thinking"),
    (CHAT, {"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning.effort"),
    (CHAT, {"reasoning": {"exclude": True}, "include_reasoning": True}, "reasoning.exclude"),
    (CHAT, {"include_reasoning": "no"}, "include_reasoning"),
    (CHAT, {"reasoning": "high"}, "reasoning"),
    (RESPONSES, {"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 50}}, "thinking.budget_tokens"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
    (CHAT, {"reasoning_effort": "extreme"}, "reasoning_effort"),
    (CHAT, {"reasoning_effort": ""}, "reasoning_effort"),
    (CHAT, {"reasoning": {"effort": "High"}}, "reasoning.effort"),
    (RESPONSES, {"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    (RESPONSES, {"reasoning": {"effort": 3}}, "reasoning.effort"),
    (RESPONSES, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    (RESPONSES, {"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning.effort"),
    (MESSAGES, {"output_config": {"effort": "none"}}, "output_config.effort"),
    (OLLAMA, {"think": "extreme"}, "think"),
])  # fmt: skip
def test_refused(always: Served, path: str, body: dict[str, Any], where: str) -> None:
    response = always.post(path, {"model": MODEL, **OWN[path], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(where), message


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_efforts(switched: Served, path: str) -> None:
    efforts = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    for effort in efforts:
        assert sent(switched, path, {"reasoning": {"effort": effort}}) is None
    response = switched.post(path, {"model": MODEL, **OWN[path], "reasoning": {"effort": "extreme"}})
    message = check_error(response, 400, "reasoning")["message"]
    assert all(repr(effort) in message for effort in efforts)


def test_completions_have_no_limit_of_the_reasoning(always: Served) -> None:
    for body in ({"thinking_token_budget": 3}, {"phases": {"reasoning": None}}):
        response = always.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, **body})
        if "phases" in body:  # an unknown parameter
            assert response.status_code == 200 and always.runner.seen_params[-1].phases is None
        else:
            check_error(response, 400, "thinking_token_budget", "unsupported_parameter")
    for name, value, neutral in [
        ("enable_thinking", True, False),
        ("thinking_budget", 3, 0),
        ("thinking", {"type": "enabled"}, {"type": "disabled"}),
    ]:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        check_error(always.post("/v1/completions", {**body, name: value}), 400, name, "unsupported_parameter")
        assert always.post("/v1/completions", {**body, name: neutral}).status_code == 200


def test_a_model_that_does_not_reason(caplog: pytest.LogCaptureFixture) -> None:
    """A limit is ignored, with one note. Turning reasoning off needs no note."""
    caplog.set_level(logging.WARNING, "metal_engine")
    with serve(script("Yes."), config=CONFIG, tokenizer=tiny_tokenizer("{{ messages[0].content }}")) as served:
        assert sent(served, CHAT, {"thinking_token_budget": 0}) is None
        assert not [message for message in caplog.messages if "limit of the reasoning" in message]
        for path, body, budget in LIMITS:
            if budget:
                assert sent(served, path, body) is None
        assert len([message for message in caplog.messages if "limit of the reasoning" in message]) == 1


def test_stop_strings_have_the_marks_of_reasoning(always: Served) -> None:
    """The engine does not search for stop strings within the reasoning."""
    assert sent(always, CHAT, {"stop": "x"}) == OutputPhases(ReasoningPhase("<think>", "</think>", begins_inside=True))


CHAT = "/v1/chat/completions"
HIDDEN: list[dict[str, Any]] = [
    {"include_reasoning": False},
    {"reasoning": {"exclude": True}},
    {"reasoning": {"exclude": True, "max_tokens": 50}, "include_reasoning": False},
]


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Served]:
    with answering("#\n</think>\n\n*", AnswerFormat(reasoning=THINK), "{{ messages[0].content }}<think>\n") as served:
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


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 100}),
    ("/api/chat", {"messages": USER, "stream": False}),
])  # fmt: skip
def test_other_apis(reasoning: Served, path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        body = {"model": MODEL, **body, "stream": stream}
        shown, hidden = (reasoning.post(path, {**body, "include_reasoning": value}).text for value in (True, False))
        assert "#" in shown and "#" not in hidden and "*" in hidden
    if path == "/v1/responses":
        assert "#" not in reasoning.post(path, {**body, "reasoning": {"exclude": True}}).text
