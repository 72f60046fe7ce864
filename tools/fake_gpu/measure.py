"""Steps an engine on the fake GPU and measures each part of a step."""

from __future__ import annotations

import functools
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_engine.engine.core import EngineCore
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.runner.step_sampling import StepSampling

from .device import Counts, FakeGpu

# Functions of the engine that make up the parts of a step. Nested calls are counted once.
_PARTS: tuple[tuple[Any, str, str], ...] = (
    (ModelRunner, "_build", "graph"),
    (StepSampling, "build", "graph"),
    (mx, "async_eval", "evaluate"),
    (PendingStep, "wait", "wait"),
)


@dataclass(frozen=True)
class Measured:
    """Means over steps in milliseconds.

    ``graph``, ``evaluate``, ``engine`` and ``host`` are CPU time of the engine's thread.

    Attributes:
        graph: building the forward and the sampling.
        evaluate: MLX's evaluation, including encoding.
        engine: all other work: scheduling, packing, text.
        host: sum of ``graph``, ``evaluate`` and ``engine``.
        blocked: wait in the dispatch of a step until the device has caught up.
        wait: wait for the end of a step.
        step: wall-clock time.
        counts: the device's counts over all steps.
        peak_bytes: peak of MLX's memory, minus the memory at the start.
        num_steps: number of measured steps.
    """

    graph: float
    evaluate: float
    engine: float
    host: float
    blocked: float
    wait: float
    step: float
    counts: Counts
    peak_bytes: int
    num_steps: int


class _Clocks:
    """CPU and wall-clock times of wrapped functions by part, without nested parts."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)
        self._inner = [(0.0, 0.0)]

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append((0.0, 0.0))
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                inner_cpu, inner_wall = self._inner.pop()
                self.cpu[part] += cpu - inner_cpu
                self.wall[part] += wall - inner_wall
                outer_cpu, outer_wall = self._inner[-1]
                self._inner[-1] = outer_cpu + cpu, outer_wall + wall

        return timed


@contextmanager
def _clocks() -> Iterator[_Clocks]:
    clocks = _Clocks()
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in _PARTS]
    for owner, name, part in _PARTS:
        setattr(owner, name, clocks.wrap(getattr(owner, name), part))
    try:
        yield clocks
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def measure(
    gpu: FakeGpu, engine: EngineCore, num_steps: int, before_step: Callable[[int], None] = lambda step: None
) -> Measured:
    """Step an engine with requests in decode and return the means over the steps. Resets the device's counts.

    Args:
        before_step: called with the index of each step. Its time counts as the engine's.
    """
    gc.collect()
    gc.disable()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    with _clocks() as clocks:
        gpu.counts(reset=True)
        cpu, wall = time.thread_time(), time.perf_counter()
        for step in range(num_steps):
            before_step(step)
            engine.step()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        counts = gpu.counts()
    gc.enable()
    graph, evaluate = clocks.cpu["graph"], clocks.cpu["evaluate"] + clocks.cpu["wait"]
    scale = 1e3 / num_steps
    return Measured(
        graph=scale * graph,
        evaluate=scale * evaluate,
        engine=scale * (cpu - graph - evaluate),
        host=scale * cpu,
        blocked=scale * (clocks.wall["evaluate"] - clocks.cpu["evaluate"]),
        wait=scale * (clocks.wall["wait"] - clocks.cpu["wait"]),
        step=scale * wall,
        counts=counts,
        peak_bytes=mx.get_peak_memory() - held,
        num_steps=num_steps,
    )


def count_kernels(gpu: FakeGpu, engine: EngineCore, num_steps: int = 4) -> float:
    """Run ``num_steps`` steps. Return the average number of kernels per step. Resets the device's counts."""
    gpu.counts(reset=True)
    for _ in range(num_steps):
        engine.step()
    return gpu.counts().kernels / num_steps
