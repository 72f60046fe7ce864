"""Long responses in the background: a request, and waiting for its end and for the release of its memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import httpx
import openai
import pytest

from metal_engine.server.openai.response_state import ResponseState
from tests.support.serving import DEADLINE, MODEL, wait_until

# Steps of a model that writes more tokens than a test waits for.
SLOW = 0.005
LONG: dict[str, Any] = {"model": MODEL, "input": "hi", "background": True, "max_output_tokens": 3000}
HTTP = httpx.Client(timeout=DEADLINE)


def finished(client: openai.OpenAI, response_id: str) -> Any:
    """Wait for the end of a response, and return it."""
    deadline = time.monotonic() + DEADLINE
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return response


def wait_for_status(client: openai.OpenAI, response_id: str, status: str) -> None:
    wait_until(lambda: client.responses.retrieve(response_id).status == status, status)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeakSet[ResponseState]]:
    """Yield the set of response states that were created during the test and are still in memory."""
    alive: WeakSet[ResponseState] = WeakSet()
    create = ResponseState.__init__

    def recorded(state: ResponseState, *args: Any) -> None:
        create(state, *args)
        alive.add(state)

    monkeypatch.setattr(ResponseState, "__init__", recorded)
    yield alive


def wait_until_freed(states: WeakSet[ResponseState]) -> None:
    def are_freed() -> bool:
        gc.collect()
        return not states

    wait_until(are_freed, "the responses to be freed")
