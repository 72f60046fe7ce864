"""Random requests, aborts and failing steps, in any order, on an engine with two steps in flight.

MLX's operations run on a CPU. Steps are dispatched behind a running step, in two parts, as on a GPU. All requests have
their usual outputs after failures, except requests with three failures in a row. No blocks stay in use.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from metal_engine.kv_cache.pool import StatePool
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import PreparedRequest, RequestOutput, client_id
from metal_engine.runner.batch import RequestTable
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.runner.replay import DecodeReplay
from metal_engine.runner.step_pooling import StepPooling
from metal_engine.runner.step_sampling import StepSampling
from metal_engine.sampling_params import SamplingParams
from tests.support.mixed_requests import LONG, MIXED
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import byte_ids

# Functions that can fail, by name. Each raises before or after its work.
POINTS: dict[str, tuple[Any, str, bool]] = {
    "graph": (ModelRunner, "_build", True),
    "before a trace": (DecodeReplay, "_run", False),
    "after a trace": (DecodeReplay, "_run", True),
    "sampling": (StepSampling, "build", True),
    "dispatch": (mx, "async_eval", False),
    "before the wait": (PendingStep, "wait", False),
    "after the wait": (PendingStep, "wait", True),
    "result": (StepSampling, "result", False),
    "append": (RequestTable, "append_tokens", False),
    "appended": (RequestTable, "append_tokens", True),
    "pooling": (StepPooling, "result", False),
    "pooled": (StepPooling, "result", True),
    "new cache": (StatePool, "evaluate", False),
}
MAX_LIVE = 8


MODELS: dict[str, dict[str, Any]] = {"attention": {}, "recurrent": {"architecture": "qwen3_5", "num_state_slots": 36}}
# Some prompts share a prefix, and some take several chunks. The same seed gives the same output.
ASKED: list[tuple[list[int], SamplingParams | PoolingParams]] = [
    *((prompt, params) for prompt, params in MIXED if params.seed is not None),
    (LONG, PoolingParams(pooling_type="MEAN")),
    (byte_ids("to be pooled"), PoolingParams(pooling_type="LAST")),
]


@dataclass
class Answer:
    """Result of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    vector: np.ndarray | None = None
    finish_reason: str | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.tokens += output.token_ids
        self.logprobs += [entry.logprob for entry in output.logprobs or ()]
        self.vector = output.pooled
        self.finish_reason = output.finish_reason

    def check(self, alone: Answer) -> None:
        """Check that the result equals that of the request alone, or is a prefix of it if the request failed."""
        assert self.tokens == alone.tokens[: len(self.tokens)]
        np.testing.assert_allclose(self.logprobs, alone.logprobs[: len(self.logprobs)], atol=1e-4)
        if self.finish_reason not in (None, "error"):
            assert (self.tokens, self.finish_reason) == (alone.tokens, alone.finish_reason)
            assert len(self.logprobs) == len(alone.logprobs)
            assert (self.vector is None) == (alone.vector is None)
            if self.vector is not None and alone.vector is not None:
                np.testing.assert_allclose(self.vector, alone.vector, atol=1e-4)


@functools.cache
def prepared_and_alone(model: str) -> list[tuple[PreparedRequest, Answer]]:
    """Return each request, with its result when it runs alone, one step at a time."""
    engine = tiny_engine(**MODELS[model])
    found = []
    for prompt, params in ASKED:
        is_pooling = isinstance(params, PoolingParams)
        prepared = engine.prepare_pooling([prompt], params)[0] if is_pooling else engine.prepare(prompt, params)
        engine.add_request("alone", prepared)
        answer = Answer()
        while engine.has_requests:
            for output in engine.step():
                answer.take(output)
        assert answer.finish_reason in ("stop", "length")
        found.append((prepared, answer))
    return found


class FailureMachine(RuleBasedStateMachine):
    """State machine with faults. A fault is armed for the next call, or a later call, of its function."""

    model = "attention"

    @initialize(
        num_blocks=st.sampled_from([24, 128]),
        max_num_seqs=st.sampled_from([2, 4, 12]),
        budget=st.sampled_from([12, 64]),
        first=st.lists(st.integers(0, len(ASKED) - 1), min_size=3, max_size=MAX_LIVE),
        replay=st.booleans(),
    )
    def start_engine(self, num_blocks: int, max_num_seqs: int, budget: int, first: list[int], *, replay: bool) -> None:
        self.known = prepared_and_alone(self.model)
        self.patch = pytest.MonkeyPatch()
        self.faults: dict[str, int] = {}  # function name -> number of successful calls before the failure
        self.num_raised = 0
        self.engine = tiny_engine(
            **MODELS[self.model], behind=True, replay=replay, num_blocks=num_blocks, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
        )  # fmt: skip
        self.runner: Any = self.engine.runner
        self.config = self.engine.scheduler.config
        for where in POINTS:
            self._install(where)
        self.failures: dict[str, list[int]] = {}  # lengths of each request at its failures
        self.given_up: set[str] = set()
        retry, requests = self.engine.core._retry, self.engine.scheduler.requests

        def checked(plan: Any, error: Exception) -> list[RequestOutput]:
            failed = [r for r in plan.num_scheduled_tokens if r in requests]
            for request_id in failed:
                self.failures.setdefault(request_id, []).append(requests[request_id].num_tokens)
            outputs = retry(plan, error)
            given_up = {r for r in failed if self.failures[r][-3:] == self.failures[r][-1:] * 3}
            assert {output.request_id for output in outputs} == given_up
            self.given_up |= {client_id(request_id) for request_id in given_up}
            return outputs

        self.patch.setattr(self.engine.core, "_retry", checked)
        self.asked: dict[str, int] = {}
        self.found: dict[str, Answer] = {}
        self._add(first)

    def _install(self, where: str) -> None:
        owner, name, is_after = POINTS[where]
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_due = self.faults.get(where) == 0
            if where in self.faults:
                self.faults[where] -= 1
            if is_due:
                del self.faults[where]
                self.num_raised += 1
            if is_due and not is_after:
                raise RuntimeError(f"at {where}")
            result = original(*args, **kwargs)
            if is_due:
                raise RuntimeError(f"at {where}")
            return result

        self.patch.setattr(owner, name, call)

    @property
    def live(self) -> list[str]:
        return [r for r, answer in self.found.items() if answer.finish_reason is None]

    def _step(self) -> None:
        outputs = self.engine.step()
        for output in outputs:
            self.found[output.request_id].take(output)
        assert self.given_up == {output.request_id for output in outputs if output.error is not None}
        self.given_up.clear()
        # One failure for each fault. Steps built on a failed step are void, and so are their faults.
        assert self.engine.metrics.num_failed_steps <= self.num_raised
        self._check()

    def _check(self) -> None:
        self.engine.scheduler.check_integrity()
        assert sorted(self.engine.request_ids) == sorted(self.live)
        assert list(self.runner._steps) == [handle for _, handle, _ in self.engine._in_flight]
        for request_id, answer in self.found.items():
            answer.check(self.known[self.asked[request_id]][1])

    def _add(self, which: list[int]) -> None:
        for i in which:
            request_id = f"r{len(self.asked)}"
            self.asked[request_id], self.found[request_id] = i, Answer()
            self.engine.add_request(request_id, self.known[i][0])

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(which=st.lists(st.integers(0, len(ASKED) - 1), min_size=1, max_size=4))
    def arrive(self, which: list[int]) -> None:
        self._add(which)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.live), label="victim")
        self.engine.abort_request(victim)
        del self.found[victim], self.asked[victim]
        self.asked[f"aborted {victim}"] = 0  # the id is not used again
        self._check()

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.has_requests:
                self._step()

    @rule(
        where=st.sampled_from(sorted(POINTS)),
        num_before=st.integers(0, 2),
        num_steps=st.integers(0, 5),
        which=st.lists(st.integers(0, len(ASKED) - 1), min_size=2, max_size=4),
    )
    def fail(self, where: str, num_before: int, num_steps: int, which: list[int]) -> None:
        """Make sure that there are requests, then arm a fault and run steps."""
        if len(self.live) < 3:
            self._add(which)
        self.faults[where] = num_before
        self.steps(num_steps)

    @rule(budget=st.sampled_from([2, 5, None]))
    def change_what_fits_into_a_step(self, budget: int | None) -> None:
        """With a small budget, a failing step omits some of the running requests."""
        most = self.config.max_num_batched_tokens if budget is None else budget
        self.engine.scheduler.config = replace(self.config, max_num_batched_tokens=most)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.faults.clear()
            self._drain()
            for i in range(len(self.known)):
                self.asked[f"after {i}"], self.found[f"after {i}"] = i, Answer()
                self.engine.add_request(f"after {i}", self.known[i][0])
            self._drain()
            assert "error" not in {a.finish_reason for r, a in self.found.items() if r.startswith("after")}
        finally:
            self.patch.undo()

    def _drain(self) -> None:
        for _ in range(2000):
            if not self.engine.has_requests:
                break
            self._step()
        assert not self.engine.has_requests and not self.live
        assert self.engine.stats.num_used_blocks == 0 and not self.runner._steps


class RecurrentFailureMachine(FailureMachine):
    """Runs with recurrent layers, whose state a step that is built twice would update twice."""

    model = "recurrent"


# The health checks compare generation time with execution time. Here, execution takes most of the time.
_QUICK = settings(max_examples=7, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))


class TestFailures(FailureMachine.TestCase):
    settings = _QUICK


class TestRecurrentFailures(RecurrentFailureMachine.TestCase):
    settings = settings(_QUICK, max_examples=5)


@pytest.mark.full
@pytest.mark.timeout(3600)
class TestFailuresFull(FailureMachine.TestCase):
    settings = settings(_QUICK, max_examples=200, stateful_step_count=60)


@pytest.mark.full
@pytest.mark.timeout(3600)
class TestRecurrentFailuresFull(RecurrentFailureMachine.TestCase):
    settings = settings(_QUICK, max_examples=100, stateful_step_count=60)
