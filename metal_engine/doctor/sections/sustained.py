"""Change of throughput and memory under load: shows if the machine slows down or memory grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from metal_engine.doctor.figures import Figure, at_least, at_most
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import run_random, use_engine
from metal_engine.engine.built_engine import BuiltEngine

_MAX_REQUESTS = 8
_LEAST_ROUNDS = 4


@dataclass(frozen=True)
class Round:
    """One batch of requests.

    Attributes:
        rate: output tokens per second.
        active_bytes: memory of MLX's arrays after the round, in bytes.
    """

    rate: float
    active_bytes: int


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield the change of throughput and of memory, and the number of failed steps."""
    rounds, num_failed_steps = use_engine(plan, lambda engine: _run(plan, engine), model)
    yield from sustained_figures(rounds, num_failed_steps)


def sustained_figures(rounds: list[Round], num_failed_steps: int) -> Iterator[Figure]:
    """Yield the changes of throughput and memory over at least four rounds, and the number of failed steps.

    The throughput of the last quarter of the rounds is compared with the first quarter. The memory after the last round
    is compared with the memory after the first quarter.
    """
    quarter = len(rounds) // 4
    first, last = (sum(one.rate for one in part) / quarter for part in (rounds[:quarter], rounds[-quarter:]))
    note = f"{last:.1f} tokens/s after {first:.1f}, {len(rounds)} rounds"
    promise = at_least(1.0, slack=0.1)
    yield Figure("throughput at the end, relative to the beginning", last / first, promise=promise, note=note)
    growth = rounds[-1].active_bytes / rounds[quarter - 1].active_bytes
    yield Figure("memory at the end, relative to the beginning", growth, promise=at_most(1.0, slack=0.02))
    yield Figure("failed steps", num_failed_steps, promise=at_most(0, required=True))


def _run(plan: Plan, engine: BuiltEngine) -> tuple[list[Round], int]:
    num_requests = min(_MAX_REQUESTS, max(plan.batches))
    run_random(engine, 1, plan.prompt_tokens, plan.output_tokens, seed=0)
    rounds: list[Round] = []
    end = time.monotonic() + plan.sustained_seconds
    while len(rounds) < _LEAST_ROUNDS or time.monotonic() < end:
        run = run_random(engine, num_requests, plan.prompt_tokens, plan.output_tokens, seed=len(rounds) + 1)
        rounds.append(Round(run.num_output_tokens / run.seconds, mx.get_active_memory()))
    return rounds, engine.core.metrics.num_failed_steps
