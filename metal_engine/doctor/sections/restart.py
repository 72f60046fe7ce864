"""A restart with ``--kv-cache-dir``: the second engine finds the first one's KV on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from metal_engine.doctor.figures import Figure, at_least, at_most
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import run_random, use_engine
from metal_engine.engine.built_engine import BuiltEngine

_OUTPUT_TOKENS = 2


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the share of a prompt that the second engine finds cached, and its relative time to first token."""
    with tempfile.TemporaryDirectory() as folder:
        (length, cached, first), (_, cached_again, second) = (
            use_engine(plan, lambda engine: _run(plan, engine), model, kv_cache_dir=folder) for _ in range(2)
        )
    note = f"{cached_again:,} of {length:,} tokens; {cached:,} before the restart"
    share = cached_again / length
    yield Figure("share of the prompt loaded after the restart", share, promise=at_least(0.6), note=note)
    note = f"{second:.3g} s after {first:.3g} s"
    promise = at_most(1.0, flag="leave out --kv-cache-dir")
    yield Figure(
        "time to first token after the restart, relative to before", second / first, promise=promise, note=note
    )


def _run(plan: Plan, engine: BuiltEngine) -> tuple[int, int, float]:
    """Run a long prompt. Return its length, the number of cached tokens, and the time to first token in seconds."""
    config = engine.core.config
    length = min(max(plan.long_prompts), config.scheduler.max_model_len - _OUTPUT_TOKENS)
    run_random(engine, 1, length // 2, _OUTPUT_TOKENS, seed=3)  # warms up
    run = run_random(engine, 1, length, _OUTPUT_TOKENS, seed=4)
    return length, run.num_cached_tokens[0], run.first_token_seconds[0]
