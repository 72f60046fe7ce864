"""Time of a decode step in each mode of the engine (one by one, planned ahead, ...), and utilization of the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from metal_engine.doctor.features import features
from metal_engine.doctor.figures import Figure, at_least, at_most, not_measured
from metal_engine.doctor.gpu_busy import busy_samples
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import decode_seconds, has_metal, run_random, use_engine
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.settings.config import REPLAYS

ONE_BY_ONE, AHEAD, QUEUED, REPLAYED = "one by one", "planned ahead", "queued on the device", "replayed"
# Way to run a step -> way whose time it should not exceed.
_BEFORE = {AHEAD: ONE_BY_ONE, QUEUED: AHEAD, REPLAYED: ONE_BY_ONE}
_FLAGS = {
    AHEAD: "--no-async-scheduling",
    QUEUED: "--no-async-scheduling",
    REPLAYED: "`replay-decodes: never` in --config",
}
_MAX_REQUESTS = 8
_LEAST_BUSY = 90.0  # percent
_BUSY_SECONDS = 3.0  # duration of the samples


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the time of a decode step for each way to run it, and the utilization of the GPU."""
    times: dict[str, float | str] = {}  # seconds, or why a way was not run
    times |= use_engine(
        plan,
        lambda engine: {ONE_BY_ONE: _step_seconds(plan, engine)},
        model,
        async_scheduling=False,
        replay_decodes="never",
    )
    times |= use_engine(
        plan, lambda engine: _planned_ahead(plan, engine), model, async_scheduling=True, replay_decodes="never"
    )
    facts, more, busy = use_engine(
        plan,
        lambda engine: (list(features(engine.core)), _replayed(plan, engine), _busy(plan, engine)),
        model,
        async_scheduling=True,
    )
    yield from facts
    yield from step_figures(times | more)
    yield busy


def step_figures(times: dict[str, float | str]) -> Iterator[Item]:
    """Yield the time of a step for each way to run it, relative to the time of the simpler way in ``_BEFORE``.

    Yield the absolute time as a fact if a way has no simpler way, or if the simpler way was not run.

    Args:
        times: way -> seconds of a step, or the reason why the way was not run.
    """
    for way, seconds in times.items():
        if isinstance(seconds, str):
            yield not_measured(f"step {way}", seconds)
            continue
        before = times.get(_BEFORE.get(way, ""))
        if isinstance(before, float):
            promise = at_most(1.0, slack=0.03, flag=_FLAGS[way])
            title, note = f"step {way}: time relative to steps {_BEFORE[way]}", f"{1e3 * seconds:.3g} ms"
            yield Figure(title, seconds / before, promise=promise, note=note)
        else:
            yield f"step {way}", f"{1e3 * seconds:.3g} ms"


def _step_seconds(plan: Plan, engine: BuiltEngine) -> float:
    """Return the mean time of a decode step in seconds."""
    num_requests = min(_MAX_REQUESTS, max(plan.batches))
    for seed in range(2):  # the first run compiles and traces
        run = run_random(engine, num_requests, plan.prompt_tokens, plan.decode_steps, seed=seed)
    return decode_seconds(run)


def _planned_ahead(plan: Plan, engine: BuiltEngine) -> dict[str, float | str]:
    runner: Any = engine.core.runner
    queues = runner.allow_queued_dispatch
    runner.allow_queued_dispatch = False
    times: dict[str, float | str] = {AHEAD: _step_seconds(plan, engine)}
    runner.allow_queued_dispatch = queues
    return {**times, QUEUED: _step_seconds(plan, engine) if queues else engine.core.config.dispatch}


def _replayed(plan: Plan, engine: BuiltEngine) -> dict[str, float | str]:
    refusal, state = engine.core.metrics.replay_refusal, engine.core.config.replay
    if refusal is None and state == REPLAYS:
        return {REPLAYED: _step_seconds(plan, engine)}
    return {REPLAYED: f"replay is off: {refusal}" if refusal else f"replay is {state}"}


def _busy(plan: Plan, engine: BuiltEngine) -> Figure:
    """Return the utilization of the GPU during decode steps."""
    name = "GPU busy during decode steps"
    if not has_metal():
        return not_measured(name, "only on Metal")
    end = time.monotonic() + _BUSY_SECONDS
    with busy_samples() as samples:
        while time.monotonic() < end:
            _step_seconds(plan, engine)
    if samples.median is None:
        return not_measured(name, "the driver reports no utilization")
    note = f"median of {len(samples.percent)} samples"
    return Figure(name, samples.median, "%", at_least(_LEAST_BUSY, slack=0.02), note)
