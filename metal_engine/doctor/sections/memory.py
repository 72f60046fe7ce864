"""Peak memory, compared with the peak that the server's banner promises, with and without wired memory."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from metal_engine.doctor.figures import Figure, at_most, not_measured
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import decode_seconds, has_metal, run_random, use_engine
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.settings.config import MARGIN_BYTES

_FLAG = "--gpu-memory-utilization 0.8"
_WIRED_STEP = "decode step with wired memory: time relative to without"


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the peak memory under load relative to the promised peak, and on Metal the effect of wired memory."""
    if not has_metal():
        peak, promised, _ = use_engine(plan, lambda engine: _load(plan, engine), model)
        yield memory_figure("peak memory", peak, promised)
        yield not_measured(_WIRED_STEP, "only on Metal")
        return
    # The limit of wired memory belongs to the process, so the run without it comes first.
    steps = []
    for wires in (False, True):
        peak, promised, step = use_engine(plan, lambda engine: _load(plan, engine), model, wire_memory=wires)
        yield memory_figure(f"peak memory, {'wired' if wires else 'not wired'}", peak, promised)
        steps.append(step)
    yield wired_step_figure(*steps)


def memory_figure(name: str, peak: int, promised: int) -> Figure:
    """Return the peak memory relative to the promised peak plus ``MARGIN_BYTES``. Both arguments are in bytes."""
    note = f"{peak / (1 << 20):,.0f} MiB beside {promised / (1 << 20):,.0f} MiB"
    return Figure(
        f"{name} relative to the promise", peak / (promised + MARGIN_BYTES), promise=at_most(1.0, flag=_FLAG), note=note
    )


def wired_step_figure(not_wired: float, wired: float) -> Figure:
    """Return the time of a decode step with wired memory, relative to the time without. Both are in seconds."""
    note = f"{1e3 * wired:.3g} ms beside {1e3 * not_wired:.3g} ms"
    return Figure(_WIRED_STEP, wired / not_wired, promise=at_most(1.0, slack=0.05, flag="--no-wire-memory"), note=note)


def _load(plan: Plan, engine: BuiltEngine) -> tuple[int, int, float]:
    """Run the largest step and many requests.

    Returns:
        Peak memory and promised peak in bytes, and the mean time of a decode step in seconds.
    """
    config = engine.core.config
    mx.reset_peak_memory()  # reading the weights takes more memory, which the promise excludes
    longest = min(config.scheduler.max_num_batched_tokens, config.scheduler.max_model_len - 1)
    run_random(engine, 1, longest, 1, seed=1)
    run = run_random(engine, max(plan.batches), plan.prompt_tokens, plan.decode_steps, seed=2)
    return mx.get_peak_memory(), config.peak_bytes, decode_seconds(run)
