"""Work in threads: light work does not wait for heavy work, and work without a waiting caller is dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from metal_engine.cancellation import Cancelled, check_cancelled, is_cancelled
from metal_engine.server.errors import APIError
from metal_engine.server.workers import HEAVY_BYTES, Weight, Workers


@pytest.fixture
def release() -> threading.Event:
    return threading.Event()


def run(work: Callable[[Workers], object]) -> None:
    async def main() -> None:
        workers = Workers()
        try:
            await work(workers)  # type: ignore[misc]
        finally:
            workers.close()

    asyncio.run(main())


def test_light_work_passes_heavy_work(release: threading.Event) -> None:
    async def work(workers: Workers) -> None:
        heavy = [asyncio.create_task(workers.run(Weight.HEAVY, release.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        assert await workers.run(Weight.LIGHT, lambda: 7) == 7
        release.set()
        await asyncio.gather(*heavy)

    run(work)


def test_queued_work_of_a_cancelled_caller_never_starts(release: threading.Event) -> None:
    begun: list[int] = []

    async def work(workers: Workers) -> None:
        blockers = [asyncio.create_task(workers.run(Weight.HEAVY, release.wait)) for _ in range(2)]
        left = [asyncio.create_task(workers.run(Weight.HEAVY, begun.append, i)) for i in range(5)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        results = await asyncio.gather(*left, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        release.set()
        await asyncio.gather(*blockers)
        await workers.run(Weight.HEAVY, begun.append, 9)

    run(work)
    assert begun == [9]


@pytest.mark.parametrize("by", ["cancel", "close"])
def test_running_work_detects_a_cancelled_caller_or_closed_workers(by: str, release: threading.Event) -> None:
    noticed: list[bool] = []
    started = threading.Event()

    def long() -> None:
        assert not is_cancelled()
        started.set()
        release.wait()
        try:
            check_cancelled()
        except Cancelled:
            noticed.append(True)
            raise

    async def work(workers: Workers) -> None:
        task = asyncio.create_task(workers.run(Weight.LIGHT, long))
        await asyncio.to_thread(started.wait)
        if by == "cancel":
            task.cancel()
            await asyncio.wait([task])
        else:
            workers.close()
        release.set()
        with pytest.raises((asyncio.CancelledError, APIError)):
            await task
        while not noticed:
            await asyncio.sleep(0.001)

    run(work)


@pytest.mark.parametrize("begun", [False, True])
def test_a_server_that_stops_does_not_wait_for_grammars(begun: bool, release: threading.Event) -> None:
    started = threading.Event()

    def compiling() -> None:
        started.set()
        release.wait()
        check_cancelled()

    async def work(workers: Workers) -> None:
        num_before = 0 if begun else Weight.COMPILING.value[1]
        before = [asyncio.create_task(workers.run(Weight.COMPILING, release.wait)) for _ in range(num_before)]
        light = asyncio.create_task(workers.run(Weight.LIGHT, release.wait))
        task = asyncio.create_task(workers.run(Weight.COMPILING, compiling))
        await asyncio.sleep(0)
        if begun:
            await asyncio.to_thread(started.wait)
        workers.drop(Weight.COMPILING)
        if begun:
            release.set()
        for one in (task, asyncio.create_task(workers.run(Weight.COMPILING, compiling))):
            with pytest.raises(APIError) as info:
                await one
            assert (info.value.status_code, info.value.code) == (503, "shutting_down")
        assert started.is_set() == begun
        release.set()
        await asyncio.gather(light, *before)

    run(work)


def test_a_cancelled_task_stays_cancelled_if_its_work_is_dropped(release: threading.Event) -> None:
    async def work(workers: Workers) -> None:
        task = asyncio.create_task(workers.run(Weight.LIGHT, release.wait))
        await asyncio.sleep(0)
        workers.drop(Weight.LIGHT)
        task.cancel()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)


def test_weights() -> None:
    assert Weight.of(HEAVY_BYTES) is Weight.HEAVY and Weight.of(HEAVY_BYTES - 1) is Weight.LIGHT
