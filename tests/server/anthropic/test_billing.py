"""Billing line of Claude Code: requests that differ only in this line share their prefix."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import fake_config

CONFIG = fake_config(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=2048)
TEXT = "You are an agent.\n\nx-anthropic-billing-header: is a header's name.\n" + "Be careful. " * 30
USER: list[Any] = [{"role": "user", "content": "hi"}]


def line(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{number}.f0{number}; cc_entrypoint=cli; cch=fa69{number};"


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


# Kind of system text -> the text with a billing line, and without.
FORMS = {
    "text": (lambda n: f"{line(n)}\n{TEXT}", TEXT),
    "blank line": (lambda n: f"{line(n)}\r\n\r\n{TEXT}", TEXT),
    "own block": (lambda n: [block(line(n)), block("First."), block(TEXT)], [block("First."), block(TEXT)]),
    "in a block": (lambda n: [block(f"{line(n)}\n{TEXT}")], [block(TEXT)]),
    "two blocks": (lambda n: [block(line(n)), block(f"{line(n + 1)}\n{TEXT}")], [block(TEXT)]),
    "nothing else": (line, None),
    "no other block": (lambda n: [block(line(n))], None),
    "blanks before": (lambda n: f" \n\t{line(n)}\n{TEXT}", TEXT),
    "other letters": (lambda n: [block(line(n).upper()), block(TEXT)], [block(TEXT)]),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(config=CONFIG) as served:
        yield served
        served.wait_until_idle()


def cached(served: Served, system: Any, salt: str) -> tuple[int, int]:
    """Return the number of cached prompt tokens of a request, and of all its prompt tokens."""
    body = {"model": MODEL, "max_tokens": 1, "messages": USER, "cache_salt": salt}
    usage = served.post("/v1/messages", body | ({"system": system} if system else {})).json()["usage"]
    return usage["cache_read_input_tokens"], usage["cache_read_input_tokens"] + usage["input_tokens"]


@pytest.mark.parametrize("form", FORMS)
def test_requests_share_their_prefix(server: Served, form: str) -> None:
    with_line, without = FORMS[form]
    for salt, systems in ((form, [with_line(1), with_line(2)]), (form + "'", [without, without])):
        first, second = (cached(server, system, salt) for system in systems)
        assert first[0] == 0 and first[1] == second[1]
        if salt == form:
            found = second
    assert found == second
    if without is not None:
        assert found[0] > 300


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_counted_without_the_line(server: Served, form: str) -> None:
    with_line, without = FORMS[form]
    body: dict[str, Any] = {"model": MODEL, "messages": USER}
    counts = [
        server.post("/v1/messages/count_tokens", body | ({"system": system} if system else {})).json()["input_tokens"]
        for system in (with_line(1), without)
    ]
    assert counts[0] == counts[1]


def test_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "metal_engine")
    with serve(config=CONFIG) as served:
        for number in range(3):
            cached(served, f"{line(number)}\n{TEXT}", "")
    assert sum("x-anthropic-billing-header" in record.getMessage() for record in caplog.records) == 1


def test_a_line_in_a_message_is_left_alone(server: Served) -> None:
    message = [{"role": "user", "content": f"{line(1)}\nhi"}]
    body: dict[str, Any] = {"model": MODEL, "messages": message}
    count = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert count == len(server.tokenizer.apply_chat_template(message))
