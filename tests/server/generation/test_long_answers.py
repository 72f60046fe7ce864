"""Long responses: encoded in parts outside the event loop, equal to short responses, and bounded in size."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import Mock

import pytest

from metal_engine.engine.async_engine import _UNMERGED, _Mailbox
from metal_engine.request import RequestOutput, TokenLogprobs
from metal_engine.server.generation import generation, logprobs, preparation
from metal_engine.server.generation.response_runner import stream_events
from metal_engine.server.json_parts import JSONParts
from metal_engine.server.response_bodies import ChatLogprobs, PromptLogprobs
from tests.support.serving import MODEL, Served

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("completions", {"prompt": ["ab", "c"], "n": 2, "logprobs": 3, "echo": True, "prompt_logprobs": 2}),
    "chat": ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 3}),
    "prompt": ("chat/completions", {"messages": USER, "n": 2, "prompt_logprobs": 1}),
    "response": ("responses", {"input": "hi"}),
    "message": ("messages", {"messages": USER}),
}


def answer(tiny: Served, name: str) -> Any:
    path, body = BODIES[name]
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    return tiny.post(f"/v1/{path}", {"temperature": 0, limit: 6, **body, "model": MODEL})


def leaves(value: Any, at: str = "") -> dict[str, Any]:
    """Return the values of a response by their places, without its id and times."""
    if isinstance(value, dict) and value:
        inside = [(k, v) for k, v in value.items() if k not in ("id", "created", "created_at")]
    elif isinstance(value, list) and value:
        inside = list(enumerate(value))
    else:
        return {at: str(value) if isinstance(value, dict | list) else value}
    return {place: leaf for name, one in inside for place, leaf in leaves(one, f"{at}/{name}").items()}


@pytest.mark.parametrize("name", BODIES)
def test_a_long_answer_is_as_a_short_one(tiny: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tiny, name)  # the prompt is cached from here on
    short = answer(tiny, name)
    assert short.status_code == 200, short.text
    threads: list[str] = []
    encode = JSONParts.encode

    def encoding(self: JSONParts, body: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encode(self, body)

    monkeypatch.setattr(JSONParts, "encode", encoding)
    monkeypatch.setattr(generation, "_LONG", 0)
    monkeypatch.setattr(logprobs, "_ENTRIES_AT_ONCE", 3)
    # Rounding of log probabilities depends on the prompts that share a step.
    assert leaves(answer(tiny, name).json()) == pytest.approx(leaves(short.json()), abs=1e-4)
    assert len(threads) == 1 and threads[0].startswith("heavy-work")


class _Counted(bytes):
    """Bytes that count their copies."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        return self._count(super().__getitem__(index))

    def partition(self, place: Any) -> Any:
        return tuple(map(self._count, super().partition(place)))

    def __radd__(self, before: bytes) -> Any:
        return self._count(before + bytes(self))

    def _count(self, part: bytes) -> bytes:
        _Counted.num_copied += len(part)
        return _Counted(part)


def test_a_response_with_many_parts_is_copied_once() -> None:
    parts = JSONParts()
    places = [parts.add(b"%d" % i).model_dump() for i in range(100)]
    answer: Any = Mock()
    answer.model_dump_json().encode.return_value = _Counted(json.dumps(places, separators=(",", ":")).encode())
    assert json.loads(parts.encode(answer)) == list(range(100))
    assert _Counted.num_copied < 2 * 100


def test_events_of_many_choices_are_copied_once() -> None:
    async def outputs() -> AsyncGenerator[list[tuple[int]], None]:
        yield [(i,) for i in range(100)]

    async def first_event() -> bytes:
        return await anext(stream_events(Mock(outputs=outputs), endpoint, Mock()))

    endpoint = Mock()
    endpoint.begin.return_value = b""
    endpoint.chunk.side_effect = lambda _generation, output, *_: _Counted(b"%d" % output[0])
    _Counted.num_copied = 0
    assert asyncio.run(first_event()) == b"".join(b"%d" % i for i in range(100))
    assert _Counted.num_copied == 0


def test_log_probabilities_of_one_answer_are_bounded(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_LOGPROB_ENTRIES", 15)
    refused = answer(tiny, "chat")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
    monkeypatch.setattr(preparation, "MAX_LOGPROB_ENTRIES", 5)
    refused = answer(tiny, "prompt")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_slices_make_one_whole(monkeypatch: pytest.MonkeyPatch, tiny: Served) -> None:
    monkeypatch.setattr(logprobs, "_ENTRIES_AT_ONCE", 7)
    rng = random.Random(0)
    for length in (0, 1, 2, 3, 10):
        tokens = [
            TokenLogprobs(rng.randrange(90), -rng.random(), 1, tuple((rng.randrange(90), -1e30) for _ in range(2)))
            for _ in range(length)
        ]
        offsets = list(range(length))
        made = logprobs.completion_logprobs_json(tiny.tokenizer, tokens, offsets)
        assert json.loads(made) == logprobs.completion_logprobs(tiny.tokenizer, tokens, offsets).model_dump()
        chat = ChatLogprobs.model_validate_json(logprobs.chat_logprobs_json(tiny.tokenizer, tokens))
        assert chat == logprobs.chat_logprobs(tiny.tokenizer, tokens)
        prompt: PromptLogprobs = json.loads(logprobs.prompt_logprobs_json(tiny.tokenizer, [None, *tokens]))
        assert len(prompt) == length + 1 and prompt[0] is None


def test_unread_outputs_are_merged_until_the_mailbox_is_overfull() -> None:
    mailbox = _Mailbox(1, max_unread=1000)
    for i in range(500):
        logprob = TokenLogprobs(i, -1.0, 1, ((i, -1.0),))
        mailbox.put(RequestOutput("r", [i], text="a", logprobs=[logprob], text_logprobs=[logprob]))
        assert len(mailbox._arrived) <= _UNMERGED + 500 // _UNMERGED
    assert not mailbox.is_overfull
    mailbox.put(RequestOutput("r", [500], text_logprobs=[logprob]))
    assert mailbox.is_overfull


def test_a_mailbox_read_in_time_is_never_overfull() -> None:
    mailbox = _Mailbox(1, max_unread=3)
    logprob = TokenLogprobs(7, -1.0, 1, ((7, -1.0),))

    async def read_each() -> None:
        for i in range(5):
            mailbox.put(RequestOutput("r", [i], text="a", logprobs=[logprob], text_logprobs=[logprob]))
            assert not mailbox.is_overfull
            await mailbox.take()

    asyncio.run(read_each())


def test_outputs_after_the_final_output_are_dropped() -> None:
    mailbox = _Mailbox(1, max_unread=1000)
    for output in (
        RequestOutput("r", [1], text="a"),
        RequestOutput("r", finish_reason="abort", error="cut"),
        RequestOutput("r", [2], text="b"),
    ):
        mailbox.put(output)
    assert asyncio.run(mailbox.take()).finish_reason == "abort"
