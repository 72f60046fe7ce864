"""System messages at any place and consecutive user messages, with templates that refuse or drop them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from metal_engine.server.openai.message_order import in_accepted_order, with_single_calls
from tests.support.calling import CONFIG
from tests.support.serving import MODEL, serve
from tests.text.test_message_rules import ALTERNATING, LEAVES_OUT, SYSTEM_FIRST
from tools.fixtures.fake_engine import CHAT_TEMPLATE, tiny_tokenizer


def chat(*pairs: str) -> list[dict[str, Any]]:
    """Return messages from texts like ``user: hi``."""
    return [{"role": role, "content": content} for role, content in (pair.split(": ", 1) for pair in pairs)]


# Message orders of Codex and Claude Code.
GIVEN = chat("system: A", "system: B", "user: env", "user: hi", "system: C", "assistant: yes", "user: go", "system: D")
TURNED = {
    "system first": (
        SYSTEM_FIRST,
        [
            *chat("system: A\n\nB", "user: env", "user: hi", "user: <system>\nC\n</system>"),
            *chat("assistant: yes", "user: go", "user: <system>\nD\n</system>"),
        ],
    ),
    "alternating": (
        ALTERNATING,
        chat("system: A\n\nB", "user: env\n\nhi", "system: C", "assistant: yes", "user: go", "system: D"),
    ),
    "both": (
        SYSTEM_FIRST + ALTERNATING,
        [
            *chat("system: A\n\nB", "user: env\n\nhi\n\n<system>\nC\n</system>"),
            *chat("assistant: yes", "user: go\n\n<system>\nD\n</system>"),
        ],
    ),
    "leaves out": (
        LEAVES_OUT,
        [
            *chat("system: A\n\nB", "user: env", "user: hi", "user: <system>\nC\n</system>"),
            *chat("assistant: yes", "user: go", "user: <system>\nD\n</system>"),
        ],
    ),
}


@pytest.mark.parametrize("name", TURNED)
def test_messages_are_reordered_for_templates_that_refuse_the_order(name: str) -> None:
    template, expected = TURNED[name]
    rules = tiny_tokenizer(template).message_rules
    given = [dict(message) for message in GIVEN]
    ordered = in_accepted_order(given, rules)
    assert ordered == expected
    assert given == GIVEN  # unchanged, because a conversation can be stored
    assert in_accepted_order(ordered, rules) is ordered
    # Earlier messages are unchanged when more messages follow.
    more = in_accepted_order([*given, *chat("assistant: done", "system: E", "user: on")], rules)
    assert more[: len(ordered)] == ordered


def test_messages_that_the_template_accepts_stay_unchanged() -> None:
    assert in_accepted_order(GIVEN, tiny_tokenizer(CHAT_TEMPLATE).message_rules) is GIVEN


WRITES_ONE = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
WRITES_ONE += "{% endfor %}"
REFUSES_SEVERAL = "{% for m in messages if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endfor %}"


def called(content: str, *names: str) -> dict[str, Any]:
    """Return a message with calls. The id of each call is the name of its function."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize("template", [WRITES_ONE, REFUSES_SEVERAL + WRITES_ONE])
def test_a_message_for_each_call_if_the_template_takes_only_one(template: str) -> None:
    one, other, stray = ({"role": "tool", "tool_call_id": name, "content": name} for name in "fgx")
    given = [*chat("user: hi"), called("So.", "f", "g"), other, one, stray, called("", "f"), one]
    split = [*chat("user: hi"), called("So.", "f"), one, called("", "g"), other, stray, called("", "f"), one]
    rules = tiny_tokenizer(template).message_rules
    assert with_single_calls(given, rules) == split
    assert with_single_calls(split, rules) is split
    assert with_single_calls(given[:3], rules) == [*chat("user: hi"), called("So.", "f"), called("", "g"), other]
    several = tiny_tokenizer(WRITES_ONE.replace("[0].function.name", " | tojson")).message_rules
    assert with_single_calls(given, several) is given


# As in Mistral's templates.
ALTERNATING_WITHOUT_CALLS = (
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_user_text_after_a_result_joins_it_if_the_template_refuses_it() -> None:
    """Claude Code sends reminders after results."""
    result = {"role": "tool", "tool_call_id": "f", "content": "done"}
    given = [*chat("user: hi"), called("", "f"), result, *chat("user: note", "user: go", "assistant: yes", "user: on")]
    joined = [*given[:2], {**result, "content": "done\n\nnote\n\ngo"}, *given[5:]]
    assert in_accepted_order(given, tiny_tokenizer(ALTERNATING_WITHOUT_CALLS).message_rules) == joined
    assert in_accepted_order(given, tiny_tokenizer(CHAT_TEMPLATE).message_rules) is given


def test_over_http(caplog: pytest.LogCaptureFixture) -> None:
    """Chats with OpenAI's newer name of the role. The reordering is logged once."""
    tokenizer = tiny_tokenizer(SYSTEM_FIRST)
    asked = [{**m, "role": m["role"].replace("system", "developer")} for m in GIVEN]
    with serve(config=CONFIG, tokenizer=tokenizer) as served, caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = served.post("/v1/chat/completions", {"model": MODEL, "max_tokens": 1, "messages": asked})
            assert answer.status_code == 200
            expected = tokenizer.apply_chat_template(TURNED["system first"][1])
            assert answer.json()["usage"]["prompt_tokens"] == len(expected)
    assert sum("chat template does not keep messages in the order" in record.message for record in caplog.records) == 1
