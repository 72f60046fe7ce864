"""Steps dispatched behind a running step, in two parts, produce the same tokens as steps one by one.

On a CPU, no step goes behind by itself. The tests force it, and MLX's real operations compute.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.request import RequestOutput, client_id
from metal_engine.runner import dispatch as dispatch_module
from metal_engine.runner import replay as replay_module
from metal_engine.runner.dispatch import choose_dispatch
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.runner.start_check import CheckDeadline
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.settings.config import NO_REPLAY_WITHOUT_KERNEL, DeviceInfo, RankInfo
from tests.support.memory import settled_memory
from tests.support.mixed_requests import MODELS as ATTENTION_AND_RECURRENT
from tests.support.mixed_requests import WINDOWS, add_mixed, check_equal, undisturbed
from tests.support.running import drain
from tests.support.sweeps import diagonal, sweep
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.fixtures.fake_engine import byte_ids
from tools.fixtures.stepped_engine import SteppedEngine

MODELS = ATTENTION_AND_RECURRENT | WINDOWS
SIZES: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 256},
    "chunks": {"num_blocks": 256, "max_num_batched_tokens": 12, "max_num_seqs": 12},
    "preempted": {"num_blocks": 17, "max_num_batched_tokens": 24, "max_num_seqs": 8},
}


def allow_queued_dispatch(engine: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that records for each new step whether it was dispatched while another step was in flight."""
    runner: Any = engine.runner
    execute = runner.execute
    seen: list[bool] = []

    def noted(plan: Any) -> PendingStep:
        is_ahead = bool(runner._steps)
        step: PendingStep = execute(plan)
        seen.append(is_ahead and step.is_dispatched)
        return step

    monkeypatch.setattr(runner, "execute", noted)
    return seen


@pytest.mark.parametrize(
    ("sizes", "model", "replay"),
    sweep(
        product(SIZES, MODELS, [False, True]),
        [
            *(("roomy", "attention", False), ("chunks", "windows", False), ("preempted", "recurrent", False)),
            *(("chunks", "attention", True), ("preempted", "attention", True)),
        ],
    ),
)
def test_queued_dispatch_gives_the_same_outputs(
    sizes: str, model: str, replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers all controls, including grammars. Replayed steps follow replayed and built steps."""
    engine = tiny_engine(behind=True, replay=replay, **MODELS[model], **SIZES[sizes])
    seen = allow_queued_dispatch(engine, monkeypatch)
    add_mixed(engine)
    check_equal(drain(engine), model)
    if model == "recurrent":  # most steps store states and go after, and a token taken back is a preemption
        return
    assert sum(seen) > 3
    assert (engine.stats.num_preemptions > 0) == (sizes == "preempted")
    assert not replay or engine.metrics.num_decode_forwards["replayed"] > 0


@pytest.mark.parametrize("replay", [False, True], ids=["built", "replayed"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_aborts_and_lost_caches(seed: int, replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step loses the whole KV cache. All requests still get their full output."""
    expected = undisturbed("attention")
    engine = tiny_engine(behind=True, replay=replay, **SIZES["chunks"])
    runner: Any = engine.runner
    seen = allow_queued_dispatch(engine, monkeypatch)
    rng = random.Random(seed)
    plans, execute, wait = {}, runner.execute, PendingStep.wait
    survivors: list[set[str]] = []
    gone: set[str] = set()

    def executed(plan: Any) -> PendingStep:
        step: PendingStep = execute(plan)
        plans[step] = plan
        return step

    def fails(step: PendingStep) -> None:
        wait(step)
        left_out = engine.scheduler.running.keys() - plans[step].num_scheduled_tokens.keys()
        if step.has_queued_successor and left_out and len(survivors) < 2 and rng.random() < 0.3:
            survivors.append(set(map(client_id, left_out)))
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner, "execute", executed)
    monkeypatch.setattr(PendingStep, "wait", fails)
    allocate, allocations = runner.pool.allocate, []
    monkeypatch.setattr(runner.pool, "allocate", lambda *size: (allocations.append(size), allocate(*size)))

    def step() -> list[RequestOutput]:
        outputs = engine.step()
        # The requests with penalties and bad words are in every second step.
        others = [r for r in engine.request_ids if r not in {"2-0", "8-0"}.union(*survivors)]
        if rng.random() < 0.1 and len(others) > 2:
            gone.add(victim := rng.choice(others))
            engine.abort_request(victim)
        if rng.random() < 0.1:
            engine.scheduler.preempt_all()
        return outputs

    add_mixed(engine)
    found = drain(engine, step)
    assert any(seen) and not runner._steps
    forwards = {step.decode_forward.outcome for step in plans if step.decode_forward is not None}
    assert ("traced" in forwards) == replay  # the first failure may disable replay
    assert survivors and len(allocations) == len(survivors) == engine.metrics.num_failed_steps
    assert survivors[-1] and not survivors[-1] & gone
    for request_id, output in expected.items():
        tokens = token_ids(found.get(request_id, []))
        assert tokens == (output.token_ids[: len(tokens)] if request_id in gone else output.token_ids)


def test_outputs_are_returned_before_the_second_part_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(behind=True)
    runner: Any = engine.runner
    told_with_rest = []
    for i in range(2):
        engine.add_request(str(i), engine.prepare(byte_ids("abc"), SamplingParams(max_tokens=8, ignore_eos=True)))
    while engine.has_requests:
        if engine.step() and runner._steps:
            told_with_rest.append(runner._steps[0].has_second_part)
    assert len(told_with_rest) >= 6 and all(told_with_rest)


def test_steps_with_grammar_masks_are_not_queued_behind_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(behind=True)
    runner: Any = engine.runner
    dispatch = runner._dispatch
    were_alone: list[bool] = []

    def checked(step: PendingStep, *args: Any) -> None:
        if step.sampling.has_masks:
            were_alone.append(runner._steps[0] is step)
        dispatch(step, *args)

    monkeypatch.setattr(runner, "_dispatch", checked)
    regex = StructuredOutputsParams(regex="[a-z]{12}")
    requests = [(byte_ids("x"), SamplingParams(max_tokens=14, structured_outputs=regex, seed=i)) for i in range(2)]
    requests.append((byte_ids("y"), SamplingParams(max_tokens=30, ignore_eos=True)))
    outputs = run_all(engine, requests)
    assert all(len("".join(o.text for o in of_one)) >= 12 for of_one in outputs)
    assert len(were_alone) >= 12 and all(were_alone)


def test_writes_stay_in_place() -> None:
    """Writes stay in place even on MLX's CPU backend, which releases the inputs of an operation after it has run."""
    engine = tiny_engine(behind=True, num_blocks=8192)
    array_bytes = min(a.nbytes for state in engine.runner.pool.states for a in state.arrays.values())
    run_all(engine, [(byte_ids("abc"), SamplingParams(max_tokens=5, ignore_eos=True))])
    before = settled_memory()
    run_all(engine, [(byte_ids("abcde" * i), SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(1, 4)])
    assert mx.get_peak_memory() - before < array_bytes


# --- choice of the mode -------------------------------------------------------------------------------------


METAL = DeviceInfo(kind="metal", name="", compute="", memory_bytes=1)
RANKS = (RankInfo(host="a", weight_bytes=1, peak_bytes=1, num_layers=2),) * 2


@pytest.mark.parametrize(
    ("given", "model", "reason"),
    [
        ({"device": replace(METAL, kind="cpu")}, {}, "a CPU gains nothing"),
        ({"ranks": RANKS}, {}, "several ranks share the model"),
        ({}, {"architecture": "mamba", "num_state_slots": 60}, "without a KV cache"),
        ({}, ATTENTION_AND_RECURRENT["recurrent"] | {"num_blocks": 8}, "recurrent states are too large"),
        ({}, {"max_model_len": 1}, "a request fits only one step"),
    ],
    ids=["cpu", "ranks", "no KV", "recurrent", "one token"],
)
def test_queued_dispatch_is_off_with_the_reason_where_unsupported(
    given: dict[str, Any], model: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(ahead=True, **model)
    runner: Any = engine.runner
    monkeypatch.setattr(ModelRunner, "execute", None)  # the choice must not run a step
    dispatch = choose_dispatch(runner, replace(engine.config, **{"device": METAL, **given}))
    assert dispatch.startswith("each step is dispatched after the end of the previous step: ") and reason in dispatch
    assert not runner.allow_queued_dispatch


@pytest.fixture
def short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the check short, without keeping the CPU busy."""
    monkeypatch.setattr(dispatch_module, "_BUSY_SHAPE", (8, 8))


@pytest.mark.usefixtures("short_check")
@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 2), (1, 3), (2, 1), (64, 8)])
def test_a_check_in_a_small_cache(num_blocks: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(ahead=True, num_blocks=num_blocks, block_size=block_size)
    runner: Any = engine.runner
    execute, num_rows = runner.execute, []

    def counted(plan: Any) -> PendingStep:
        num_rows.append(len(plan.num_scheduled_tokens))
        return execute(plan)

    monkeypatch.setattr(runner, "execute", counted)
    assert "failed" not in choose_dispatch(runner, replace(engine.config, device=METAL))
    assert len(num_rows) >= 4 and min(num_rows) > 0


@pytest.mark.usefixtures("short_check")
@pytest.mark.parametrize(("where", "at"), diagonal(["execute", "wait", "result"], [0, 1, 5, 7]))
def test_a_check_that_fails_is_no_end(where: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of the check's eight steps fails, the engine still starts and serves."""
    requests = [
        (byte_ids(text), SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)) for text in ("ab", "c")
    ]
    expected = list(map(token_ids, run_all(tiny_engine(), requests)))
    engine = tiny_engine(ahead=True, num_blocks=64)
    runner: Any = engine.runner
    count = itertools.count()
    with monkeypatch.context() as patch:
        owner = {"execute": ModelRunner, "wait": PendingStep, "result": PendingStep}[where]
        original = getattr(owner, where)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                if where == "result":
                    original(*args, **kwargs)
                raise RuntimeError("no memory left")
            return original(*args, **kwargs)

        patch.setattr(owner, where, failing)
        dispatch = choose_dispatch(runner, replace(engine.config, device=METAL))
    assert dispatch.startswith(
        "each step is dispatched after the end of the previous step: the trial of queued steps failed: "
    )
    assert "no memory left" in dispatch
    assert not runner.allow_queued_dispatch and not runner._steps and not runner._table._index_of
    assert list(map(token_ids, run_all(engine, requests))) == expected


@pytest.mark.usefixtures("short_check")
def test_queued_dispatch_is_off_if_the_check_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch_module, "CheckDeadline", lambda: CheckDeadline(-1.0))
    engine = tiny_engine(ahead=True, num_blocks=64)
    runner: Any = engine.runner
    dispatch = choose_dispatch(runner, replace(engine.config, device=METAL))
    assert "takes more than" in dispatch and not runner.allow_queued_dispatch and not runner._table._index_of
    (record,) = caplog.records
    assert "takes more than" in record.message and record.exc_info is None


@pytest.mark.usefixtures("short_check")
def test_a_failed_queued_dispatch_check_does_not_disable_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed step ran a trace for the first time. Running behind another step may be the cause, not the trace."""
    requests = [(byte_ids("ab"), SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0))]
    expected = list(map(token_ids, run_all(tiny_engine(), requests)))
    engine = tiny_engine(ahead=True, num_blocks=64, replay=True)
    runner: Any = engine.runner
    refusals: list[str] = []
    with monkeypatch.context() as patch:
        wait = PendingStep.wait

        def failing(step: PendingStep) -> None:
            wait(step)
            if (
                runner.allow_queued_dispatch
                and step.decode_forward is not None
                and step.decode_forward.outcome == "traced"
            ):
                raise RuntimeError("no memory left")

        patch.setattr(PendingStep, "wait", failing)
        reset_traces = runner.replay.reset_traces
        patch.setattr(runner.replay, "reset_traces", lambda: (refusals.append(runner.replay_refusal), reset_traces()))
        dispatch = choose_dispatch(runner, replace(engine.config, device=METAL))
    assert "the trial of queued steps failed" in dispatch
    assert "failed that was replayed for the first time" in refusals[0]
    assert runner.replay_refusal is None and runner.replay.num_traces == 0
    assert list(map(token_ids, run_all(engine, requests))) == expected
    assert engine.metrics.num_decode_forwards["replayed"] > 3


def test_an_unsupported_backend_refuses_replay_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "ReplayableBackend", str)  # no backend is of this type
    for is_asked_for in (False, True):
        engine = tiny_engine(replay=is_asked_for)
        assert engine.metrics.replay_refusal == (NO_REPLAY_WITHOUT_KERNEL if is_asked_for else None)
