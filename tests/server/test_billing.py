"""Billing line of Claude Code, from itself or through routers: requests that differ only in the line share a prefix."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from metal_engine.server.openai.base_chat_endpoint import without_billing_line
from tests.support.calling import CONFIG
from tests.support.serving import MODEL, Served, serve

TEXT = "You are an agent.\n\nx-anthropic-billing-header: is a header's name.\n" + "Be careful. " * 30
USER = {"role": "user", "content": "hi"}
CHAT, RESPONSES, MESSAGES, COUNT = (
    f"/v1/{name}" for name in ("chat/completions", "responses", "messages", "messages/count_tokens")
)


def line(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{number}.f0{number}; cc_entrypoint=cli; cch=fa69{number};"


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def chat(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [*([{"role": role, "content": content}] if content else []), USER]}


def message(system: Any) -> dict[str, Any]:
    return {"messages": [USER], **({"system": system} if system else {})}


# Kind of request -> path, request with a billing line, request without.
FORMS: dict[str, tuple[str, Any, Any]] = {
    "chat": (CHAT, lambda n: chat("system", f"{line(n)}\n{TEXT}"), chat("system", TEXT)),
    "developer": (CHAT, lambda n: chat("developer", f"\n {line(n)}\r\n\r\n{TEXT}"), chat("system", TEXT)),
    "parts": (CHAT, lambda n: chat("system", [part(line(n).title()), part(TEXT)]), chat("system", [part(TEXT)])),
    "chat of nothing else": (CHAT, lambda n: chat("system", line(n)), chat("system", None)),
    "instructions": (
        RESPONSES, lambda n: {"instructions": f"{line(n)}\n{TEXT}", "input": "hi"},
        {"instructions": TEXT, "input": "hi"},
    ),
    "input": (
        RESPONSES, lambda n: {"input": chat("developer", f"{line(n)}\n{TEXT}")["messages"]},
        {"input": chat("developer", TEXT)["messages"]},
    ),
    "text": (MESSAGES, lambda n: message(f"{line(n)}\n{TEXT}"), message(TEXT)),
    "blank line": (MESSAGES, lambda n: message(f"{line(n)}\r\n\r\n{TEXT}"), message(TEXT)),
    "own block": (
        MESSAGES, lambda n: message([part(line(n)), part("a"), part(TEXT)]), message([part("a"), part(TEXT)]),
    ),
    "in a block": (MESSAGES, lambda n: message([part(f"{line(n)}\n{TEXT}")]), message([part(TEXT)])),
    "two blocks": (MESSAGES, lambda n: message([part(line(n)), part(f"{line(n + 1)}\n{TEXT}")]), message([part(TEXT)])),
    "nothing else": (MESSAGES, lambda n: message(line(n)), message(None)),
    "nothing else in a block": (MESSAGES, lambda n: message([part(line(n))]), message(None)),
    "blanks before": (MESSAGES, lambda n: message(f" \n\t{line(n)}\n{TEXT}"), message(TEXT)),
    "other letters": (MESSAGES, lambda n: message([part(line(n).upper()), part(TEXT)]), message([part(TEXT)])),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(config=CONFIG) as served:
        yield served


def usage(served: Served, path: str, asked: dict[str, Any], salt: str) -> tuple[int, int]:
    """Return the number of prompt tokens of a request, and how many of them were cached."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    told = served.post(path, {"model": MODEL, limit: 1, "cache_salt": salt, **asked}).json()["usage"]
    if path == MESSAGES:
        cached = told["cache_read_input_tokens"]
        return cached + told["input_tokens"], cached
    if path == RESPONSES:
        return told["input_tokens"], told["input_tokens_details"]["cached_tokens"]
    return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("form", FORMS)
def test_requests_share_their_prefix(server: Served, form: str) -> None:
    path, with_line, without = FORMS[form]
    first, second = (usage(server, path, with_line(n), form) for n in (1, 2))
    assert first[1] == 0 and (second[1] > 300 or "nothing else" in form)
    assert [first, second] == [usage(server, path, without, form + "'") for _ in range(2)]
    if path == MESSAGES:
        assert server.post(COUNT, {"model": MODEL, **with_line(1)}).json() == {"input_tokens": first[0]}


def messages(*contents: str, role: str = "system") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize("sent", [
    messages(""), messages(TEXT), messages(f"First.\n{line(1)}"), messages("First.", line(1)),
    messages(line(1), role="user"), messages(f"{line(1)}{'x' * 5000}\n{TEXT}"), messages("x-anthropic-billing: 1;"),
], ids=range(7))  # fmt: skip
def test_messages_without_a_removable_billing_line_are_unchanged(sent: list[dict[str, Any]]) -> None:
    assert without_billing_line(sent) is sent


def test_removing_billing_lines_keeps_the_remaining_text() -> None:
    assert without_billing_line(messages(f"{line(1)}\n{line(2)}\n\nb")) == messages("b")
    assert without_billing_line(messages(line(1))) == messages("")
    assert without_billing_line(messages(line(1), "b")) == messages("b")


def test_a_billing_header_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "metal_engine")
    with serve(config=CONFIG) as served:
        for form in ("chat", "instructions", "text"):
            usage(served, FORMS[form][0], FORMS[form][1](1), "")
    assert sum("x-anthropic-billing-header" in record.getMessage() for record in caplog.records) == 1
