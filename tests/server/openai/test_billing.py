"""Billing line of Claude Code in OpenAI's requests: places where routers put it, and texts that keep the line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from metal_engine.server.openai.conversation import without_billing_line
from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import fake_config

CONFIG = fake_config(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=2048)
TEXT = "You are an agent.\n\nx-anthropic-billing-header: is a header's name.\n" + "Be careful. " * 30
USER = {"role": "user", "content": "hi"}


def line(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{number}.f0{number}; cc_entrypoint=cli; cch=fa69{number};"


def text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def chat(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [*([{"role": role, "content": content}] if content else []), USER]}


# Kind of request -> path, request with a billing line, request without.
CHATS: dict[str, tuple[str, Any, Any]] = {
    "system": ("chat/completions", lambda n: chat("system", f"{line(n)}\n{TEXT}"), chat("system", TEXT)),
    "developer": ("chat/completions", lambda n: chat("developer", f"\n {line(n)}\r\n\r\n{TEXT}"), chat("system", TEXT)),
    "parts": (
        "chat/completions",
        lambda n: chat("system", [text(line(n).title()), text(TEXT)]),
        chat("system", [text(TEXT)]),
    ),
    "nothing else": ("chat/completions", lambda n: chat("system", line(n)), chat("system", None)),
    "instructions": (
        "responses",
        lambda n: {"instructions": f"{line(n)}\n{TEXT}", "input": "hi"},
        {"instructions": TEXT, "input": "hi"},
    ),
    "input": (
        "responses",
        lambda n: {"input": [{"role": "developer", "content": f"{line(n)}\n{TEXT}"}, USER]},
        {"input": [{"role": "developer", "content": TEXT}, USER]},
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(config=CONFIG) as served:
        yield served
        served.wait_until_idle()


def usage(served: Served, path: str, asked: dict[str, Any], salt: str) -> tuple[int, int]:
    """Return the number of prompt tokens of a request, and how many of them were cached."""
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = served.post(f"/v1/{path}", {"model": MODEL, limit: 1, "cache_salt": salt, **asked}).json()
    told = answer["usage"]
    if path == "responses":
        return told["input_tokens"], told["input_tokens_details"]["cached_tokens"]
    return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("form", CHATS)
def test_requests_share_their_prefix(server: Served, form: str) -> None:
    path, with_line, without = CHATS[form]
    first, second = (usage(server, path, with_line(n), form) for n in (1, 2))
    assert first[1] == 0
    plain = [usage(server, path, without, form + "'") for _ in range(2)]
    assert [first, second] == plain
    if form != "nothing else":
        assert second[1] > 300


def messages(*contents: str, role: str = "system") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize(
    "sent",
    [
        messages(""),
        messages(TEXT),
        messages(f"First.\n{line(1)}"),
        messages("First.", line(1)),
        messages(line(1), role="user"),
        messages(f"{line(1)}{'x' * 5000}\n{TEXT}"),
        messages("x-anthropic-billing: 1;"),
    ],
    ids=range(7),
)
def test_other_texts_are_left_alone(sent: list[dict[str, Any]]) -> None:
    assert without_billing_line(sent) is sent


def test_what_is_left() -> None:
    assert without_billing_line(messages(f"{line(1)}\n{line(2)}\n\nb")) == messages("b")
    assert without_billing_line(messages(line(1))) == messages("")
    assert without_billing_line(messages(line(1), "b")) == messages("b")


def test_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "metal_engine")
    with serve(config=CONFIG) as served:
        for number in range(3):
            usage(served, "chat/completions", chat("system", f"{line(number)}\n{TEXT}"), "")
    assert sum("x-anthropic-billing-header" in record.getMessage() for record in caplog.records) == 1
