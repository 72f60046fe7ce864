"""Random requests, ends of processes and failed loads, in any order, with processes that are only pretended.

All requests get their usual tokens, once each, except requests that were computed when three processes ended in a row.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metal_engine.engine.device_access import DeviceAccess
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.process import wire
from metal_engine.engine.process.limits import ProcessLimits
from metal_engine.engine.process.packed_requests import unpacked_ids
from metal_engine.engine.process.packed_results import packed_metrics
from metal_engine.engine.process.spawner import Spawner
from metal_engine.engine.process.supervisor import EngineSupervisor
from metal_engine.errors import ModelLoadError
from metal_engine.request import MAX_FAILURES, RequestOutput, RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.stats import SchedulerStats
from tests.support.serving import wait_until
from tools.fixtures.fake_engine import fake_config, generated, tiny_tokenizer

CONFIG = fake_config()
PREPARER = RequestPreparer(CONFIG, tiny_tokenizer())
NUMBERS = wire.Numbers(SchedulerStats(0, 0, 0, 64, 0, 0), packed_metrics(EngineMetrics()))


class FakeProcess:
    """Process that computes when the test says so. Has the methods of ``EngineProcess``.

    Args:
        load_error: error of loading the model; None if it loads.
    """

    def __init__(self, load_error: Exception | None) -> None:
        self.requests: dict[str, list[int]] = {}  # tokens of the unfinished requests
        self.prompts: dict[str, list[int]] = {}
        self.has_ended = False
        self.last_words = ""
        self._load_error = load_error
        self._events: queue.SimpleQueue[wire.FromEngine | Callable[[], None] | str] = queue.SimpleQueue()

    def send(self, message: wire.Message) -> None:
        if isinstance(message, wire.Submit):
            self.prompts[message.request_id] = unpacked_ids(message.prompt)
            so_far = [] if message.so_far is None else list(message.so_far.token_ids)
            self.requests[message.request_id] = self.prompts[message.request_id] + so_far
        elif isinstance(message, wire.End):
            self.requests.pop(message.request_id, None)
        elif isinstance(message, wire.Shutdown):
            self._events.put("shut down")

    def build(self, order: wire.Build, access: DeviceAccess) -> wire.Ready:
        if self._load_error is not None:
            raise self._load_error
        return wire.Ready(NUMBERS, CONFIG, [], None, None)

    def receive_all(self, on_message: Callable[[wire.FromEngine], None]) -> str:
        while not isinstance(event := self._events.get(), str):
            event() if callable(event) else on_message(event)
        return event

    def kill(self) -> None:
        self.has_ended = True

    def end_hang(self, hang: str) -> None:
        self.end(hang)

    # --- called by the test ---

    def step(self, request_ids: list[str], num_tokens: int) -> None:
        """Compute one token of some requests. They end after ``num_tokens`` tokens."""
        self._events.put(wire.Computing(request_ids))
        outputs = []
        for request_id in request_ids:
            tokens, prompt = self.requests[request_id], self.prompts[request_id]
            tokens += generated(tokens, 1)
            is_last = len(tokens) - len(prompt) == num_tokens
            outputs.append(wire.Output(request_id, tokens[-1:], finish_reason="length" if is_last else None))
            if is_last:
                del self.requests[request_id]
        self._events.put(wire.Outputs(outputs, NUMBERS.stats))

    def begin_step(self, request_ids: list[str]) -> None:
        self._events.put(wire.Computing(request_ids))

    def end(self, problem: str) -> None:
        self.has_ended = True
        self._events.put(problem)

    def wait(self) -> None:
        """Wait until all events so far are processed."""
        done = threading.Event()
        self._events.put(done.set)
        assert done.wait(10.0)


class Supervision(RuleBasedStateMachine):
    NUM_TOKENS = 5

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[FakeProcess] = []
        self.num_failed_loads = 0  # number of coming processes that do not load
        self.prompts: dict[str, list[int]] = {}
        self.received: dict[str, list[RequestOutput]] = {}
        self.num_failures: dict[str, int] = {}  # of open requests
        self.computing: list[list[str]] = []  # of the current process
        limits = ProcessLimits(max_restarts=10**6, spare_delay=math.inf)
        spawner = Spawner("none", wire.Start([], "", ""), limits)
        spawner._spawn = self._spawn  # type: ignore[method-assign]
        supervisor = EngineSupervisor(spawner, {}, lambda ready: tiny_tokenizer())
        self.ends: list[str] = []
        supervisor.start(self._receive, self.ends.append)
        self.supervisor = supervisor

    def _spawn(self) -> Any:
        error = ModelLoadError("not enough memory") if self.num_failed_loads else None
        self.num_failed_loads -= error is not None
        self.processes.append(FakeProcess(error))
        return self.processes[-1]

    def _receive(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.received[output.request_id].append(output)

    @property
    def process(self) -> FakeProcess:
        return self.processes[-1]

    @property
    def open(self) -> list[str]:
        return list(self.num_failures)

    def _pick(self, picks: list[int]) -> list[str]:
        return list(dict.fromkeys(self.open[pick % len(self.open)] for pick in picks))

    @precondition(lambda self: len(self.num_failures) < 6)
    @rule(prompt=st.lists(st.integers(0, 255), min_size=1, max_size=4))
    def submit(self, prompt: list[int]) -> None:
        request_id = str(len(self.prompts))
        self.prompts[request_id], self.received[request_id], self.num_failures[request_id] = prompt, [], 0
        self.supervisor.submit(request_id, PREPARER.prepare(prompt, SamplingParams(max_tokens=self.NUM_TOKENS)))

    @precondition(lambda self: self.num_failures)
    @rule(picks=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def step(self, picks: list[int]) -> None:
        request_ids = self._pick(picks)
        self.computing.append(request_ids)
        self.process.step(request_ids, self.NUM_TOKENS)
        self.process.wait()
        for request_id in request_ids:
            self.num_failures[request_id] = 0
            if self.received[request_id][-1].finish_reason is not None:
                del self.num_failures[request_id]

    @precondition(lambda self: self.num_failures)
    @rule(pick=st.integers(0, 5))
    def abort(self, pick: int) -> None:
        (request_id,) = self._pick([pick])
        self.supervisor.end(request_id, RequestStatus.FINISHED_ABORTED)
        del self.num_failures[request_id]

    @rule(picks=st.lists(st.integers(0, 5), max_size=4), num_failed_loads=st.integers(0, 2), hangs=st.booleans())
    def die(self, picks: list[int], num_failed_loads: int, hangs: bool) -> None:
        """End the process, perhaps in a step."""
        if picks and self.open:
            self.computing.append(self._pick(picks))
            self.process.begin_step(self.computing[-1])
        self.num_failed_loads = num_failed_loads
        num_restarts = sum(self.supervisor._metrics.restart.counts)
        self.process.end_hang("a hang") if hangs else self.process.end("an end")
        wait_until(lambda: sum(self.supervisor._metrics.restart.counts) > num_restarts, "the restart")
        self.process.wait()
        suspects = {request_id for step in self.computing[-2:] for request_id in step}
        self.computing = []
        for request_id in suspects & self.num_failures.keys():
            self.num_failures[request_id] += 1
            if self.num_failures[request_id] == MAX_FAILURES:
                del self.num_failures[request_id]
                assert self.received[request_id].pop().error is not None

    @invariant()
    def check(self) -> None:
        assert set(self.process.requests) == set(self.num_failures), "each process has the open requests"
        for request_id, outputs in self.received.items():
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == generated(self.prompts[request_id], len(tokens)), "given once and in order"
            assert len(tokens) < self.NUM_TOKENS or request_id not in self.num_failures
            assert not any(output.error for output in outputs)
        assert not self.supervisor.is_restarting and not self.ends

    def teardown(self) -> None:
        assert self.supervisor.shutdown()
        assert all(process.has_ended for process in self.processes)


def test_a_request_over_the_failure_limit_fails_even_if_a_resumption_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Supervision()
    machine.submit(prompt=[1])
    machine.submit(prompt=[2])
    for _ in range(MAX_FAILURES - 1):
        machine.die(picks=[0], num_failed_loads=0, hangs=False)
    send, refused = FakeProcess.send, []

    def refuse_once(self: FakeProcess, message: wire.Message) -> None:
        if isinstance(message, wire.Submit) and not refused:
            refused.append(message)
            raise wire.WireError("too large")
        send(self, message)

    monkeypatch.setattr(FakeProcess, "send", refuse_once)
    machine.die(picks=[0], num_failed_loads=0, hangs=False)
    assert refused
    machine.check()
    machine.teardown()


_QUICK = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


class TestSupervision(Supervision.TestCase):
    settings = _QUICK


@pytest.mark.full
class TestSupervisionFull(Supervision.TestCase):
    settings = settings(_QUICK, max_examples=500, stateful_step_count=60)
