"""Exclusive use of the device: first come, first served. Steps of two models alternate."""

from __future__ import annotations

import contextlib
import threading
from itertools import groupby
from typing import Any

import pytest

from metal_engine.engine.device_access import FairDeviceLock
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.request import PreparedRequest, RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.token_rules import NO_RULES
from tests.support.serving import serve, wait_until


def test_who_comes_first_is_first() -> None:
    lock, order = FairDeviceLock(), []

    def take(name: str) -> None:
        with lock.hold():
            order.append(name)

    threads = []
    with lock.hold():
        for number, name in enumerate("abcde", start=1):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            wait_until(lambda number=number: len(lock._waiting) == number, name)  # type: ignore[misc]
        order.append("holder")
    for thread in threads:
        thread.join()
    assert order == ["holder", *"abcde"]
    assert lock.run(lambda: 3) == 3, "the lock is free"


def test_an_error_releases_the_lock() -> None:
    lock = FairDeviceLock()

    def fail() -> None:
        raise ValueError

    for _ in range(2):
        with contextlib.suppress(ValueError):
            lock.run(fail)
        assert lock.run(lambda: 3) == 3


class BusyCore:
    """Engine that is always busy. Records its steps in a shared log, and the steps that overlap."""

    alone = threading.Lock()
    overlaps = 0

    @property
    def core(self) -> Any:
        return self

    def __init__(self, name: str, log: list[str], both: threading.Barrier) -> None:
        self.name, self.log, self.both = name, log, both
        self.has_requests = False
        self.request_ids: list[str] = []

    def add_request(self, *args: Any, **options: Any) -> None:
        self.has_requests = True
        self.both.wait()

    def step(self) -> list[RequestOutput]:
        self.log.append(self.name)
        if not self.alone.acquire(blocking=False):
            BusyCore.overlaps += 1
            return []
        # Longer than the work between two steps, as in real models.
        threading.Event().wait(0.003)
        self.alone.release()
        return []

    def on_rank_lost(self, callback: object) -> None:
        pass

    def flush_frames(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_two_busy_models_alternate() -> None:
    lock = FairDeviceLock()
    log: list[str] = []
    both = threading.Barrier(2)
    cores: list[Any] = [BusyCore(name, log, both) for name in "ab"]
    threads = [EngineThread(lambda core=core: core, lock) for core in cores]  # type: ignore[misc]
    for thread in threads:
        thread.start(lambda outputs: None)
        thread.submit("r", PreparedRequest([1], SamplingParams(), 16, NO_RULES))
    wait_until(lambda: len(log) >= 100, "steps")
    for core in cores:
        core.has_requests = False
    for thread in threads:
        assert thread.shutdown()
    assert not BusyCore.overlaps
    seen = log[:100]
    runs = [len(list(group)) for _, group in groupby(seen)]
    assert abs(seen.count("a") - seen.count("b")) <= 5 and max(runs) <= 3, runs


def test_a_single_model_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one model, the thread calls the engine's step directly."""

    def forbidden(*args: Any) -> None:
        raise AssertionError("the lock is held")

    monkeypatch.setattr(FairDeviceLock, "hold", forbidden)
    monkeypatch.setattr(FairDeviceLock, "run", forbidden)
    with serve() as served:
        answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 8})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        served.wait_until_idle()
