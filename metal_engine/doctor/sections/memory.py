"""Peak memory beside the promise of the start-up block, with and without wired memory."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from metal_engine.bench.offline import run_requests
from metal_engine.doctor.figures import Figure, at_most
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import decode_seconds, has_metal, random_prompts, use_engine
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.settings.config import MARGIN_BYTES

_FLAG = "--gpu-memory-utilization 0.8"


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the peak memory under load, relative to the promised peak."""
    # The limit of wired memory belongs to the process, so the run without it comes first.
    for wires in (False, True) if has_metal() else (True,):
        peak, promised, step = use_engine(plan, lambda engine: _load(plan, engine), model, wire_memory=wires)
        how = f", {'wired' if wires else 'not wired'}" if has_metal() else ""
        yield memory_figure(f"peak memory{how}", peak, promised)
        yield Figure(f"decode step{how}", 1e3 * step, "ms")


def memory_figure(name: str, peak: int, promised: int) -> Figure:
    """Return the peak memory relative to the promised peak and its margin, all in bytes."""
    note = f"{peak / (1 << 20):,.0f} MiB beside {promised / (1 << 20):,.0f} MiB"
    return Figure(
        f"{name} relative to the promise", peak / (promised + MARGIN_BYTES), promise=at_most(1.0, flag=_FLAG), note=note
    )


def _load(plan: Plan, engine: BuiltEngine) -> tuple[int, int, float]:
    """Run the largest step and many requests. Return the peak and the promised peak in bytes, and seconds of a step."""
    config = engine.core.config
    mx.reset_peak_memory()  # reading the weights takes more, and is not promised
    longest = min(config.scheduler.max_num_batched_tokens, config.scheduler.max_model_len - 1)
    vocab_size, num_requests = config.model.vocab_size, max(plan.batches)
    run_requests(engine, random_prompts(1, longest, vocab_size, seed=1), [1])
    prompts = random_prompts(num_requests, plan.prompt_tokens, vocab_size, seed=2)
    run = run_requests(engine, prompts, [plan.decode_steps] * num_requests)
    return mx.get_peak_memory(), config.peak_bytes, decode_seconds(run)
