"""Times of MLX computations, with their evaluation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

Call = Callable[[], Any]


def in_turns(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Return the median time of each call over ``repeats`` rounds, in seconds. Each round runs all calls once.

    An additional first round is not counted. The time of a call includes the evaluation of the arrays that it returns.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            times[name].append(_timed(call))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _timed(call: Call) -> float:
    start = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - start
