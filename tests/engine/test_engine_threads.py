"""Threads lent to engines: reused, ended on close, and not used again after failed work."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from metal_engine.engine.engine_threads import EngineThreads
from tests.support.serving import DEADLINE


def names(threads: EngineThreads, num_at_once: int) -> list[str]:
    """Run several functions at the same time. Return the names of their threads."""
    seen: list[str] = []
    together = threading.Barrier(num_at_once + 1)

    def work() -> None:
        seen.append(threading.current_thread().name)
        together.wait(DEADLINE)

    lent = [threads.lend(work) for _ in range(num_at_once)]
    for one in lent:
        one.start()
    assert all(one.is_alive() for one in lent)
    together.wait(DEADLINE)
    for one in lent:
        one.join(DEADLINE)
        assert not one.is_alive()
    return sorted(seen)


def test_a_thread_is_lent_again() -> None:
    ended: list[str] = []
    threads = EngineThreads(lambda: ended.append(threading.current_thread().name))
    for _ in range(20):
        assert names(threads, 1) == ["engine-0"]
    assert names(threads, 3) == ["engine-0", "engine-1", "engine-2"]
    assert names(threads, 2) < ["engine-2", "engine-2"]
    assert ended == []
    assert threads.close(DEADLINE)
    assert sorted(ended) == ["engine-0", "engine-1", "engine-2"]
    assert not {f"engine-{i}" for i in range(3)} & {one.name for one in threading.enumerate()}
    with pytest.raises(RuntimeError):
        threads.lend(lambda: None).start()


def test_one_whose_work_failed_is_not_lent_again() -> None:
    ended: list[str] = []
    threads = EngineThreads(lambda: ended.append(threading.current_thread().name))

    def fail() -> None:
        raise ValueError("its streams have met an error")

    lent = threads.lend(fail)
    lent.start()
    lent.join(DEADLINE)
    assert not lent.is_alive() and ended == ["engine-0"]
    assert names(threads, 1) == ["engine-1"]
    assert threads.close(DEADLINE)


def test_work_that_does_not_end() -> None:
    threads, gate = EngineThreads(), threading.Event()

    def wait() -> None:
        gate.wait(DEADLINE)

    lent = threads.lend(wait)
    lent.start()
    lent.join(0.01)
    assert lent.is_alive() and not threads.close(0.01)
    gate.set()
    assert threads.close(DEADLINE)


def test_nothing_is_kept_of_what_was_done() -> None:
    class Work:
        def __call__(self) -> None:
            pass

    threads, work = EngineThreads(), Work()
    gone = weakref.ref(work)
    lent = threads.lend(work)
    lent.start()
    lent.join(DEADLINE)
    del work
    gc.collect()
    assert gone() is None
    assert threads.close(DEADLINE)
