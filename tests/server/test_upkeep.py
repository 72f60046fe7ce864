"""Times at which a server returns memory to the system."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import pytest

from metal_engine.device.memory_pressure import MemoryPressure
from metal_engine.server import upkeep
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.upkeep import FreedMemory, release_idle_memory
from metal_engine.server.workers import Workers
from tests.support.serving import Served, wait_until


@dataclass
class Server:
    """Request and worker counts of a server, as read by :class:`FreedMemory`."""

    num_active: int = 0
    num_begun: int = 0
    num_heavy: int = 0
    is_heavy_in_flight: bool = False

    @property
    def memory(self) -> FreedMemory:
        return FreedMemory(cast(Lifecycle, self), cast(Workers, self))


def polls_until_due(memory: FreedMemory, most: int = 30) -> int | None:
    return next((i + 1 for i in range(most) if memory.is_due()), None)


def test_a_server_without_requests_returns_no_memory_to_the_system() -> None:
    assert polls_until_due(Server().memory) is None


def test_an_idle_server_returns_memory_once() -> None:
    server = Server()
    memory = server.memory
    server.num_begun = server.num_active = 1
    assert polls_until_due(memory) is None  # busy
    server.num_active = 0
    assert polls_until_due(memory) == 10
    assert polls_until_due(memory) is None


def test_requests_that_follow_each_other_keep_memory() -> None:
    server = Server()
    memory = server.memory
    for _ in range(5):
        server.num_begun += 1
        assert polls_until_due(memory, most=9) is None
        server.num_active = 1
        assert not memory.is_due()
        server.num_active = 0


def test_a_large_body_is_returned_while_the_server_is_busy() -> None:
    server = Server()
    memory = server.memory
    server.num_active = server.num_begun = server.num_heavy = 1
    server.is_heavy_in_flight = True
    assert polls_until_due(memory) is None
    server.is_heavy_in_flight = False
    assert polls_until_due(memory) == 1
    server.num_heavy += 1
    assert polls_until_due(memory) == 5  # not after each of many heavy tasks
    assert polls_until_due(memory) is None


def test_upkeep_continues_after_an_error_and_logs_repeats_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that is repeated is logged once, and again after a success."""
    monkeypatch.setattr(upkeep, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(upkeep, "memory_pressure", lambda: MemoryPressure.CRITICAL)
    monkeypatch.setattr(upkeep, "blas_threads", lambda: None)
    problems = ["cannot release", "cannot release", "no such model", "", "no such model"]
    num_calls = 0

    def release(_seconds: float) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= len(problems) and (problem := problems[num_calls - 1]):
            raise RuntimeError(problem)

    async def run() -> None:
        server: Any = Server()
        task = asyncio.create_task(upkeep.run_upkeep(server, server, release))
        while num_calls <= len(problems) and not task.done():
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(run())
    assert num_calls > len(problems)
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged == ["cannot release", "no such model", "no such model"]


def test_an_idle_model_frees_its_cache_under_pressure(served: Served) -> None:
    release = served.server._models.release_memory
    assert served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4}).status_code == 200
    served.wait_until_idle()
    before = served.runner.num_released
    for pressure in (MemoryPressure.NORMAL, MemoryPressure.WARNING):
        release_idle_memory(release, pressure)  # the last request has just ended
    release_idle_memory(release, MemoryPressure.CRITICAL)
    wait_until(lambda: served.runner.num_released == before + 1, "the release")
    served.engine.last_used -= 20
    release_idle_memory(release, MemoryPressure.WARNING)
    assert served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4}).status_code == 200
    assert served.runner.num_released == before + 1, "it was free already"


def test_a_model_in_use_keeps_its_cache(served: Served) -> None:
    before = served.runner.num_released
    served.runner.running.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, "/v1/completions", {"prompt": "abc", "max_tokens": 4})
        wait_until(lambda: served.engine.num_open_requests == 1, "the request")
        release_idle_memory(served.server._models.release_memory, MemoryPressure.CRITICAL)
        served.engine.release_memory()  # the engine's thread has a request, too
        served.runner.running.set()
        assert answer.result().status_code == 200
    served.wait_until_idle()
    assert served.runner.num_released == before
