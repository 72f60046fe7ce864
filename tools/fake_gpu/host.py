"""Measures the CPU time of the thread that runs decode steps on the fake GPU.

Compares steps that the engine builds each time, steps that it replays, and mlx-lm's steps.

Imports MLX, so :func:`tools.fake_gpu.install` must be called first.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import os
import pstats
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from metal_engine.device.command_buffers import command_buffer_limits
from metal_engine.engine.async_engine import AsyncEngine, _Mailbox
from metal_engine.engine.engine_thread import EngineThread

from .device import FakeGpu, FakeGpuSettings
from .workload import Workload, add_model_arguments, make_engine, make_model, workload_of

# Maximum ratio of the engine thread's CPU time with replayed decode steps to its time with built steps.
MAX_REPLAYED = 0.65
TURNS = 6
_WARM_UP = 20


class Ours:
    """Engine with requests in decode. As in a server, an event loop converts the outputs to text."""

    def __init__(self, workload: Workload, *, replay: bool, has_head: bool = False) -> None:
        self.engine = make_engine(workload, ahead=True, replay=replay, has_head=has_head, allow_queued_dispatch=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._clients = AsyncEngine(EngineThread(lambda: self.engine))
        self._clients._loop = self._loop
        self._clients._client = self.engine.client
        for i in range(workload.num_requests):
            self._clients._queues[str(i)] = _Mailbox(0, max_unread=1 << 20)

    def step(self) -> None:
        self._clients._on_outputs(self.engine.core.step())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.engine.close()


class MlxLm:
    """mlx-lm's generator, for comparison with :class:`Ours`: same model and number of sequences, all in decode.

    Does not convert tokens to text.
    """

    def __init__(self, workload: Workload) -> None:
        stream = mx.default_stream(mx.default_device())
        sizes = {"completion_batch_size": workload.num_requests, "prefill_batch_size": workload.num_requests}
        self._generator = BatchGenerator(
            make_model(workload.model), max_tokens=workload.max_tokens, stream=stream, **sizes
        )
        self._generator.insert([[1] * (workload.prompt_len + i % 17) for i in range(workload.num_requests)])
        while len(self._generator.next_generated()) < workload.num_requests:
            pass

    def step(self) -> None:
        self._generator.next_generated()

    def close(self) -> None:
        self._generator.close()


@dataclass
class Times:
    """Times of each step in microseconds.

    Attributes:
        whole: CPU time of the thread that runs the steps.
        evaluated: part of ``whole`` in ``mx.eval`` and ``mx.async_eval``.
    """

    whole: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)


def measure(steppers: dict[str, Any], num_steps: int) -> dict[str, Times]:
    """Return the times of all steppers' steps, by name. Replaces ``mx.eval`` and ``mx.async_eval`` until it returns.

    Each stepper runs a few steps at a time in rotation, so that other load on the machine affects all.
    """
    times = {name: Times() for name in steppers}
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                spent += time.thread_time() - start

        return call

    originals = mx.async_eval, mx.eval
    mx.async_eval, mx.eval = map(timed, originals)  # type: ignore[assignment]
    try:
        for turn in range(TURNS):
            for name in steppers if turn % 2 else reversed(steppers):
                gc.collect()
                gc.disable()
                for _ in range(num_steps // TURNS):
                    spent, start = 0.0, time.thread_time()
                    steppers[name].step()
                    times[name].whole.append(1e6 * (time.thread_time() - start))
                    times[name].evaluated.append(1e6 * spent)
                gc.enable()
                mx.synchronize()
    finally:
        mx.async_eval, mx.eval = originals
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=32)
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, default=240, help="number of timed steps of each engine")
    parser.add_argument("--kernel-us", type=float, default=20.0, help="device time of a kernel")
    parser.add_argument("--profile", choices=("built", "replayed"), help="print a profile of this engine instead")
    parser.add_argument("--no-figures", action="store_true", help="measure without failing on a missed figure")


def run(gpu: FakeGpu, args: argparse.Namespace) -> int:
    """Print the report. Return the exit status of the process.

    It is 1 if replayed steps take more than ``MAX_REPLAYED`` of the time of built steps, or at least the time of
    mlx-lm's steps. With ``--no-figures`` or ``--profile``, it is 0.
    """
    workload = workload_of(args)
    limits = command_buffer_limits([workload.model], mx.device_info()["memory_size"], allows_queued_dispatch=True)
    assert limits.max_ops is not None  # limits exist for this model
    gpu.configure(FakeGpuSettings(max_ops=limits.max_ops, max_mb=limits.max_mb, kernel_us=args.kernel_us))
    steppers: dict[str, Any] = {
        "built": Ours(workload, replay=False),
        "replayed": Ours(workload, replay=True),
        "replayed, with a draft head": Ours(workload, replay=True, has_head=True),
        "mlx-lm's BatchGenerator": MlxLm(workload),
    }
    for stepper in steppers.values():
        for _ in range(_WARM_UP):
            stepper.step()
    if args.profile:
        _profile(steppers[args.profile], args.steps)
        return 0
    forwards = steppers["replayed"].engine.metrics.num_decode_forwards
    forwards.clear()
    times = measure(steppers, max(args.steps, TURNS))
    print(
        f"{args.requests} sequences, {workload.num_layers} layers, "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. "
        f"CPU time of the stepping thread in us, over {len(times['built'].whole)} steps. "
        f"{forwards['replayed'] / forwards.total():.0%} of the replayed engine's steps were replayed.\n"
    )
    print("| | median | quartile | evaluating, median | over built | over mlx-lm's |")
    print("| --- | --- | --- | --- | --- | --- |")
    medians = {name: statistics.median(t.whole) for name, t in times.items()}
    for name, t in times.items():
        ratios = [f"{medians[name] / medians[other]:.2f}" for other in ("built", "mlx-lm's BatchGenerator")]
        quartile = sorted(t.whole)[len(t.whole) // 4]
        cells = [f"{medians[name]:,.0f}", f"{quartile:,.0f}", f"{statistics.median(t.evaluated):,.0f}", *ratios]
        print(f"| {name} | {' | '.join(cells)} |")
    for stepper in steppers.values():
        stepper.close()
    missed = []
    if medians["replayed"] > MAX_REPLAYED * medians["built"]:
        missed.append(f"more than {MAX_REPLAYED} times as long as built steps")
    if medians["replayed"] >= medians["mlx-lm's BatchGenerator"]:
        missed.append("at least as long as mlx-lm's")
    if missed:
        print(f"\nMissed: replayed steps take {' and '.join(missed)}")
    return int(bool(missed) and not args.no_figures)


def _profile(stepper: Any, num_steps: int) -> None:
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for _ in range(num_steps):
        stepper.step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)
