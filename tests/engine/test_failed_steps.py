"""Steps that fail in MLX: their requests are computed again. The KV of other requests survives or is recomputed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.portable import backend as mlx_ops
from metal_engine.device.streams import second_stream
from metal_engine.errors import clear_traceback_frames
from metal_engine.models.paged_model import PagedModel
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput
from metal_engine.runner.batch import RequestTable
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.runner.replay import DecodeReplay
from metal_engine.runner.step_pooling import StepPooling
from metal_engine.runner.step_sampling import StepSampling
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.step import ModelOutput
from tests.support.demo import engine_for
from tests.support.memory import settled_memory
from tests.support.running import DISPATCHES, add_all, drain, run
from tests.support.sweeps import sweep
from tests.support.tiny_engine import run_all, run_pooling, tiny_engine, token_ids, with_vocabulary
from tools.fixtures.architectures import configuration
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import random_model, tiny_model

VOCAB_SIZE = 300
# The fourth prompt does not fit into the steps of the first three, so it waits while they fail.
PROMPTS = [[5, 7, 9], [11] * 20, [3, 1, 4, 1, 5], [200, 100] * 12]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
REQUESTS = [(prompt, GREEDY) for prompt in PROMPTS]


class Fault:
    """Makes a step fail: in a layer, while the graph is built, replayed or evaluated; or in the step's result.

    Attributes:
        kind: kind of the next failure: ``build``, ``eval`` or ``result``. None for no failure.
        point: place at which a replayed step fails, since its layers are not called: its ``tokens``, the ``cache`` of
            the third layer, or its ``logits``.
        num_replayed: number of failures of replayed steps.
    """

    def __init__(self, point: str = "cache") -> None:
        self.kind: str | None = None
        self.point = point
        self.num_replayed = 0

    def install(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        mlp = model.model.layers[2].mlp
        original = type(mlp).__call__

        def call(module: Any, x: mx.array) -> mx.array:
            y = original(module, x)
            if module is not mlp or self.kind not in ("build", "eval"):
                return y
            return self._spoil(y)

        result = StepSampling.result

        def taken_over(sampling: StepSampling) -> ModelOutput:
            if self.kind == "result":
                self.kind = None
                raise RuntimeError("refused when it has ended")
            return result(sampling)

        monkeypatch.setattr(type(mlp), "__call__", call)
        monkeypatch.setattr(StepSampling, "result", taken_over)
        run_trace = DecodeReplay._run

        def run(kept: DecodeReplay, trace: Any, *args: Any) -> mx.array:
            is_replayed = self.kind in ("build", "eval") and trace in kept._traces.values()
            return run_trace(kept, self._spoilt(trace) if is_replayed else trace, *args)

        monkeypatch.setattr(DecodeReplay, "_run", run)

    def _spoil(self, y: mx.array) -> mx.array:
        kind, self.kind = self.kind, None
        if kind == "build":
            raise RuntimeError("refused while building")
        # A singular matrix, which fails when MLX evaluates it.
        return y + mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu).sum()

    def _spoilt(self, trace: Any) -> Any:
        """Return the trace, changed so that it fails once."""

        def spoilt(inputs: tuple[mx.array, ...], *args: Any) -> Any:
            self.num_replayed += 1
            *given, arrays = args
            if self.kind == "build":  # the step is then built, which fails, too
                raise RuntimeError("refused while replaying")
            if self.point == "tokens":
                inputs = (self._spoil(inputs[0]).astype(inputs[0].dtype),)
            elif self.point == "cache":
                arrays[4] = self._spoil(arrays[4])
            (logits, hidden), written = trace(inputs, *given, arrays)
            return (self._spoil(logits) if self.point == "logits" else logits, hidden), written

        return spoilt


@pytest.fixture
def fault() -> Fault:
    return Fault()


# Elements from which attention uses a second stream, and True for a model with recurrent layers.
COMPUTED = {"one stream": (None, False), "two streams": (0, False), "hybrid": (None, True)}
QUICK = [("one stream", "one by one"), ("one stream", "replayed"), ("two streams", "one ahead"), ("hybrid", "behind")]


def engine_of(model: Any, *, budget: int = 16, **settings: bool) -> SteppedEngine:
    sizes = {"vocab_size": VOCAB_SIZE, "budget": budget, "block_size": 8, "num_blocks": 64, "max_num_seqs": 3}
    return engine_for(PagedModel(model), tiny_tokenizer(), **sizes, **settings)


@pytest.fixture(params=sweep(product(product(COMPUTED, DISPATCHES)), zip(QUICK)), ids="-".join)
def engine(request: pytest.FixtureRequest, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedEngine]:
    computed, dispatch = request.param
    lane_elements, is_hybrid = COMPUTED[computed]
    monkeypatch.setattr(mlx_ops, "CPU_LIMITS", replace(mlx_ops.CPU_LIMITS, lane_elements=lane_elements))
    model = tiny_model(num_hidden_layers=4, vocab_size=VOCAB_SIZE)
    if is_hybrid:
        model = random_model(with_vocabulary(configuration("qwen3_next"), VOCAB_SIZE))
    fault.install(model, monkeypatch)
    yield engine_of(model, **DISPATCHES[dispatch])


def run_with_fault(engine: SteppedEngine, fault: Fault, kind: str, at_step: int) -> list[list[int]]:
    """Run all prompts with a fault at a step. Return their tokens."""
    add_all(engine, REQUESTS)
    steps = itertools.count()

    def step() -> list[RequestOutput]:
        if next(steps) == at_step:
            fault.kind = kind
        return engine.step()

    outputs = drain(engine, step)
    assert not any(output.error for found in outputs.values() for output in found)
    return [token_ids(outputs[str(i)]) for i in range(len(PROMPTS))]


# After an evaluation failed on a CPU, MLX misses the end of some of its tasks, and may later wait for them forever.
on_device = pytest.mark.own_process


@pytest.mark.parametrize(
    ("kind", "at_step"),
    [
        *(("build", step) for step in (0, 5)),
        pytest.param("eval", 1, marks=[on_device, pytest.mark.full]),
        pytest.param("eval", 5, marks=on_device),
        ("result", 1),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("build", 1), ("build", 2), ("result", 5))),
    ],
)
def test_requests_of_a_failed_step_are_retried_with_the_same_outputs(
    engine: SteppedEngine, fault: Fault, kind: str, at_step: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(engine, PROMPTS, GREEDY)
    with caplog.at_level(logging.ERROR):
        assert run_with_fault(engine, fault, kind, at_step) == expected
    (record,) = [r for r in caplog.records if "failed:" in r.message]
    num_retried = engine.metrics.num_retried_requests
    assert 1 <= num_retried <= 3, "the fourth request was not in the step"
    assert f"; {num_retried} requests are retried, 0 fail" in record.message and record.exc_info
    assert engine.metrics.num_failed_steps == 1
    # The first steps have prompt chunks. Steps with recurrent states are not replayed here.
    is_replayed = engine.config.cache.num_padding_blocks > 0 and engine.metrics.replay_refusal is None
    assert fault.num_replayed == int(is_replayed and at_step >= 2 and kind != "result")
    assert run(engine, PROMPTS, GREEDY) == expected


def fails_once(original: Any, at_call: int = 0, *, is_refused: bool = False) -> Any:
    """Return a function that raises at the end of one of its calls, or with ``is_refused`` at the beginning."""
    calls = itertools.count()

    def call(*args: Any) -> Any:
        is_due = next(calls) == at_call
        result = None if is_due and is_refused else original(*args)
        if is_due:
            raise RuntimeError("the device is gone")
        return result

    return call


@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES)
@pytest.mark.parametrize(
    ("owner", "name", "at_call"),
    [
        pytest.param(RequestTable, "append_tokens", 0, id="append"),
        pytest.param(RequestTable, "append_tokens", 2, id="append later", marks=pytest.mark.full),
        pytest.param(StepPooling, "result", 0, id="pooling", marks=pytest.mark.full),
        pytest.param(StepPooling, "result", 2, id="pooling later"),
    ],
)
def test_requests_are_retried_if_processing_of_a_step_result_fails(
    owner: type, name: str, at_call: int, dispatch: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing remains of the step and of the steps built on it. All outputs are complete."""
    engine = tiny_engine(**dispatch, max_num_batched_tokens=16, max_num_seqs=4)
    runner: Any = engine.runner
    requests: list[Any] = [([70] * 40, PoolingParams(pooling_type="MEAN")), *((prompt, GREEDY) for prompt in PROMPTS)]
    expected = run_pooling(engine, requests)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_once(getattr(owner, name), at_call))
        found = run_pooling(engine, requests)
    assert engine.metrics.num_failed_steps == 1 and not runner._steps
    for outputs in (found, run_pooling(engine, requests)):
        for ours, theirs in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


# Functions that raise once, while two steps are in flight.
FAULTS: dict[str, list[tuple[Any, str]]] = {
    "wait": [(PendingStep, "wait")],
    "result": [(StepSampling, "result")],
    "dispatch": [(mx, "async_eval")],
    "refused dispatch": [(mx, "async_eval")],  # the arrays of the step are not evaluated
    "graph, then result": [(ModelRunner, "_build"), (StepSampling, "result")],
}


@pytest.mark.parametrize("replay", [False, True], ids=["built", "replayed"])
@pytest.mark.parametrize("where", FAULTS)
def test_there_is_one_cache_at_a_time(where: str, replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cache is reallocated, neither the failed steps nor their errors reference the old cache."""
    engine = tiny_engine(behind=True, num_blocks=8192, replay=replay)
    runner: Any = engine.runner
    pool = runner.pool
    pool_bytes = sum(array.nbytes for state in pool.states for array in state.arrays.values())
    expected = run(engine, PROMPTS, GREEDY)
    allocations = []
    allocate = pool.allocate
    monkeypatch.setattr(pool, "allocate", lambda *size: (allocations.append(size), allocate(*size)))
    add_all(engine, REQUESTS)
    for _ in range(4):
        engine.step()
    errors = []
    retry = engine.core._retry
    monkeypatch.setattr(engine.core, "_retry", lambda plan, error: (errors.append(error), retry(plan, error))[1])
    before = settled_memory()
    with monkeypatch.context() as patch:
        for owner, name in FAULTS[where]:
            patch.setattr(owner, name, fails_once(getattr(owner, name), is_refused=where == "refused dispatch"))
        while not allocations:
            assert engine.has_requests
            engine.step()
    assert len(errors) == len(FAULTS[where])
    assert mx.get_peak_memory() - before < pool_bytes / 2
    while engine.has_requests:
        engine.step()
    assert mx.get_active_memory() - before < pool_bytes / 2
    assert len(allocations) == 1 and not runner._steps
    assert run(engine, PROMPTS, GREEDY) == expected


@on_device
def test_blocks_of_a_failed_step_are_not_cached(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are shared as soon as a plan fills them. The failed step never filled its blocks."""
    model = tiny_model(num_hidden_layers=4, vocab_size=VOCAB_SIZE)
    fault.install(model, monkeypatch)
    engine = engine_of(model, budget=64, caching=True)

    def num_cached_tokens(request_id: str) -> int:
        engine.add_request(request_id, engine.prepare([11] * 20, GREEDY))
        return drain(engine)[request_id][-1].num_cached_tokens

    fault.kind = "eval"
    assert num_cached_tokens("fails") == 0
    assert engine.metrics.num_failed_steps == 1
    assert num_cached_tokens("warm") == 16
    fault.kind = "eval"
    assert num_cached_tokens("fails again") == 16, "as at its first admission"
    assert engine.metrics.num_failed_steps == 2
    assert engine.metrics.num_cache_hits == 32, "none after a failed step"


@on_device
def test_a_lost_cache_is_computed_again(engine: SteppedEngine, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine, PROMPTS, GREEDY)
    pool = engine.runner.pool  # type: ignore[attr-defined]
    evaluate = pool.evaluate

    def broken() -> None:
        monkeypatch.setattr(pool, "evaluate", evaluate)
        raise RuntimeError("the arrays are gone")

    if not engine.config.scheduler.async_scheduling:  # with async scheduling, the pool is always dropped
        monkeypatch.setattr(pool, "evaluate", broken)
    allocations = []
    allocate = pool.allocate
    monkeypatch.setattr(pool, "allocate", lambda *size: (allocations.append(size), allocate(*size)))
    assert run_with_fault(engine, fault, "eval", 3) == expected
    assert len(allocations) == 1, "the pool must be reallocated once"


def test_a_scheduler_error_fails_all_requests(
    engine: SteppedEngine, fault: Fault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(engine, PROMPTS, GREEDY)
    add_all(engine, REQUESTS)
    engine.step()
    fault.kind = "result"  # a step in flight fails, too
    schedule = engine.scheduler.schedule
    with monkeypatch.context() as patch:
        # Fails late: the scheduler's state has advanced, and the plan is lost.
        patch.setattr(engine.scheduler, "schedule", lambda: (schedule(), 1 / 0))
        outputs = engine.step()
    fault.kind = None
    assert {o.request_id for o in outputs} == set("0123")
    assert all(o.error is not None and "ZeroDivisionError" in o.error for o in outputs)
    assert not engine.has_requests and engine.stats.num_used_blocks == 0
    assert run(engine, PROMPTS, GREEDY) == expected


def test_blocks_of_a_plan_lost_to_a_scheduler_error_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that the lost plan was to fill are never filled."""
    engine = engine_of(tiny_model(vocab_size=VOCAB_SIZE), budget=64, caching=True)
    schedule = engine.scheduler.schedule
    engine.add_request("fails", engine.prepare([11] * 20, GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", lambda: (schedule(), 1 / 0))
        (output,) = engine.step()
    assert "ZeroDivisionError" in (output.error or "")
    engine.add_request("again", engine.prepare([11] * 20, GREEDY))
    assert drain(engine)["again"][-1].num_cached_tokens == 0


def test_an_error_on_both_streams_is_raised_once() -> None:
    """A stream that waits for a failed stream gets the error, too. The next step must not receive it."""
    step = PendingStep.__new__(PendingStep)
    failed = mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu)
    with mx.stream(second_stream()):
        after = failed * 2
    step.error, step.root = None, [failed + after]
    with pytest.raises(RuntimeError, match="LU"):
        step.wait()
    step.root = [mx.array(1) + 1]
    step.wait()


@pytest.mark.parametrize("mode", ["ahead", "behind"])
def test_a_failure_before_sampling_is_built_counts_as_one_failed_step(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grammar's masks were to follow. The step built on it, which lacks samples, is no second failure."""
    digits = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[0-9]{9}"), ignore_eos=False)
    requests = [(PROMPTS[0], digits), (PROMPTS[1], GREEDY)]
    expected = [token_ids(outputs) for outputs in run_all(tiny_engine(), requests)]
    engine = tiny_engine(**{mode: True})
    dispatch, evaluate = ModelRunner._dispatch, mx.async_eval
    num_raised = 0

    def failing(*arrays: Any) -> None:
        nonlocal num_raised
        monkeypatch.setattr(mx, "async_eval", evaluate)
        num_raised += 1
        raise RuntimeError("refused while dispatching")

    def dispatched(runner: ModelRunner, step: PendingStep, logits: mx.array | None = None) -> None:
        if logits is not None and not num_raised:
            monkeypatch.setattr(mx, "async_eval", failing)
        dispatch(runner, step, logits)

    monkeypatch.setattr(ModelRunner, "_dispatch", dispatched)
    assert [token_ids(outputs) for outputs in run_all(engine, requests)] == expected
    assert engine.metrics.num_failed_steps == num_raised == 1


def test_errors_that_cause_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    cleared: list[Any] = []

    def clear(frames: Any) -> None:
        assert len(cleared) < 2, "an error is cleared again"
        cleared.append(frames)

    monkeypatch.setattr("traceback.clear_frames", clear)
    clear_traceback_frames(first)
    assert len(cleared) == 2
