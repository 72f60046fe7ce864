"""The engine's thread, on an engine that does nothing but take its time."""

from __future__ import annotations

import time
from typing import Any

from metal_engine.engine.engine_thread import EngineThread
from metal_engine.request import PreparedRequest, RequestOutput
from metal_engine.sampling_params import NO_RULES, SamplingParams
from tests.support.serving import wait_until


class SlowCore:
    """Takes 4 ms to take in a request, and never finishes one."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @property
    def has_requests(self) -> bool:
        return "add" in self.log

    @property
    def request_ids(self) -> list[str]:
        return []

    def add_request(self, *args: Any, **options: Any) -> None:
        time.sleep(0.004)
        self.log.append("add")

    def step(self) -> list[RequestOutput]:
        self.log.append("step")
        return []

    def close(self) -> None:
        pass


def test_steps_go_on_while_many_requests_come_in() -> None:
    core: Any = SlowCore()
    thread = EngineThread(lambda: core, lambda outputs: None)
    prepared = PreparedRequest([1], SamplingParams(), 16, NO_RULES)
    for i in range(20):
        thread.submit(str(i), prepared)
    thread.start()
    wait_until(lambda: core.log.count("add") == 20, "all requests")
    assert thread.shutdown()
    between_steps = "".join("+" if entry == "add" else " " for entry in core.log).split()
    # 10 ms of them and the one under way then.
    assert sum(map(len, between_steps)) == 20 and max(map(len, between_steps)) <= 4
