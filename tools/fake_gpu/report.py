"""Measures decoding on the fake GPU: the parts of the host's time, and whether the device waits for the host.

Imports MLX, so :func:`tools.fake_gpu.install` must be called first.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace

import mlx.core as mx

from metal_engine.device.command_buffers import command_buffer_limits
from tools.fixtures.stepped_engine import SteppedEngine

from .device import FakeGpu, FakeGpuSettings
from .measure import Measured, count_kernels, measure
from .workload import Workload, add_model_arguments, make_engine, prepare, workload_of

MIN_BUSY = 0.97
MIN_BUSY_MIXED = 0.93
# Maximum ratio of the engine thread's CPU time with replayed decode steps to its time with built steps.
MAX_REPLAYED = 0.65
# MLX's default limits on most Macs.
MLX_LIMITS = 40, 40
_WARM_UP = 8
_MIXED_EVERY = 8
_HEADER = (
    "| dispatch | limits | encode us | step ms | busy % | graph | evaluate | engine | host | blocked | wait | "
    "kernels | commits | pool copies | peak MB |"
)


@dataclass(frozen=True)
class ReportCase:
    """One row of the report.

    Attributes:
        name: way of dispatching steps, e.g. ``one by one``.
        ahead: value of ``--async-scheduling``.
        behind: True to dispatch a step while earlier steps run on the device.
        limits: ``max_ops`` and ``max_mb`` of :class:`FakeGpuSettings`.
        encode_us: host time for each kernel in microseconds.
        is_mixed: True to add prompts between decode steps.
        replay: True to replay decode steps.
    """

    name: str
    ahead: bool
    limits: tuple[int, int]
    behind: bool = False
    encode_us: float = 0.0
    is_mixed: bool = False
    replay: bool = False


def measure_case(gpu: FakeGpu, case: ReportCase, workload: Workload, gpu_ms: float, num_steps: int) -> Measured:
    """Run an engine for a case. The kernels of a step take ``gpu_ms`` in total."""
    if case.is_mixed:  # the number of requests stays constant
        workload = replace(workload, max_tokens=_MIXED_EVERY * workload.num_requests)
    max_ops, max_mb = case.limits
    settings = FakeGpuSettings(max_ops=max_ops, max_mb=max_mb)
    gpu.configure(settings)
    engine = make_engine(workload, ahead=case.ahead, replay=case.replay, allow_queued_dispatch=case.behind)
    try:
        pool_bytes = engine.runner.pool.smallest_array_bytes
        kernel_us = 1e3 * gpu_ms / count_kernels(gpu, engine)
        costs = replace(settings, encode_us=case.encode_us, view_us=0.15 * case.encode_us, kernel_us=kernel_us)
        gpu.configure(replace(costs, pool_array_bytes=pool_bytes))
        feed = _Prompts(engine, workload) if case.is_mixed else None
        before_step = feed.before_step if feed is not None else lambda step: None
        for step in range(_WARM_UP):
            before_step(step)
            engine.step()
        return measure(gpu, engine, num_steps, before_step)
    finally:
        gpu.configure(FakeGpuSettings())
        engine.close()


class _Prompts:
    """Adds a request every ``_MIXED_EVERY`` steps.

    Requests are prepared beforehand, because a server prepares them in other threads.
    """

    def __init__(self, engine: SteppedEngine, workload: Workload) -> None:
        self._engine = engine
        self._prepared = [prepare(engine, workload, i) for i in range(64)]
        self._number = 0

    def before_step(self, step: int) -> None:
        if step % _MIXED_EVERY == 0:
            self._engine.add_request(f"new {self._number}", self._prepared[self._number % len(self._prepared)])
            self._number += 1


def row(case: ReportCase, measured: Measured) -> str:
    counts, steps = measured.counts, measured.num_steps
    times = (measured.graph, measured.evaluate, measured.engine, measured.host, measured.blocked, measured.wait)
    cells = [
        case.name + (", replayed" if case.replay else "") + (", a prompt every 8 steps" if case.is_mixed else ""),
        "{} / {}".format(*case.limits),
        f"{case.encode_us:g}",
        f"{measured.step:.2f}",
        f"{100 * counts.busy:.1f}",
        *(f"{time:.2f}" for time in times),
        f"{counts.kernels / steps:.0f}",
        f"{counts.commits / steps:.1f}",
        f"{counts.pool_copies / steps:.2f}",
        f"{measured.peak_bytes / 1e6:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=32)
    add_model_arguments(parser)
    parser.add_argument(
        "--num-blocks", type=int, default=8192, help="blocks of 16 tokens (default: 25 M elements in an array of keys)"
    )
    parser.add_argument("--gpu-ms", type=float, default=12.0, help="device time of a step's kernels")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--encode-us", type=float, nargs="+", default=[0.0, 1.0, 2.0, 4.0], help="host time of a kernel"
    )
    parser.add_argument("--max-ops", type=int, help="kernels per command buffer (default: the engine's)")
    parser.add_argument("--max-mb", type=int, help="units of 2**20 elements per command buffer (default: the engine's)")
    parser.add_argument("--no-figures", action="store_true", help="measure without failing on a missed figure")


def run(gpu: FakeGpu, args: argparse.Namespace) -> int:
    """Print the report. Return the exit status of the process.

    It is 1 if a case misses a figure of :func:`missed_figures`, or if replayed steps without encoding take more than
    ``MAX_REPLAYED`` of the time of built steps. With ``--no-figures``, it is 0.
    """
    workload = replace(workload_of(args), num_blocks=args.num_blocks)
    ours = command_buffer_limits([workload.model], mx.device_info()["memory_size"], allows_queued_dispatch=True)
    limits = args.max_ops or ours.max_ops, args.max_mb or ours.max_mb
    cases = [
        ReportCase("one by one", False, MLX_LIMITS),
        ReportCase("after the end", True, MLX_LIMITS),
        ReportCase("one by one", False, limits),
        ReportCase("after the end", True, limits),
        *(ReportCase("behind", True, limits, True, encode_us) for encode_us in args.encode_us),
        *(ReportCase("behind", True, limits, True, encode_us, replay=True) for encode_us in args.encode_us),
        ReportCase("after the end", True, limits, is_mixed=True),
        ReportCase("behind", True, limits, True, is_mixed=True),
        ReportCase("behind", True, limits, True, is_mixed=True, replay=True),
    ]
    print(
        f"A model of a GPU (tools/fake_gpu/README.md): {args.requests} requests, {workload.num_layers} layers, "
        f"kernels of {args.gpu_ms:g} ms a step, {args.num_blocks:,} blocks; means of {args.steps} steps, times in ms a "
        f"step, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n\n{_HEADER}\n"
        f"{'| --- ' * _HEADER.count(' | ')}| --- |"
    )
    missed: list[str] = []
    host: dict[ReportCase, float] = {}
    for case in cases:
        measured = measure_case(gpu, case, workload, args.gpu_ms, args.steps)
        print(row(case, measured), flush=True)
        missed += missed_figures(case, measured, limits)
        host[case] = measured.host
    for case in (case for case in cases if case.replay and not case.is_mixed):
        ratio = host[case] / host[replace(case, replay=False)]
        print(f"\nEngine's thread at {case.encode_us:g} us a kernel, replayed over built: {ratio:.2f}")
        if case.encode_us == 0 and ratio > MAX_REPLAYED:
            missed.append(f"{case.name}: the engine's thread takes {ratio:.2f} replayed, more than {MAX_REPLAYED}")
    if args.no_figures or not missed:
        return 0
    print("\nMissed: " + "; ".join(missed))
    return 1


def missed_figures(case: ReportCase, measured: Measured, limits: tuple[int, int]) -> list[str]:
    """Return a message for each required figure that a case misses.

    Nothing is required of a case whose command buffer limits differ from ``limits``.
    """
    if case.limits != limits:
        return []
    missed = []
    if measured.counts.pool_copies:
        missed.append(f"{case.name}: {measured.counts.pool_copies} copies of the pool's arrays")
    least = MIN_BUSY_MIXED if case.is_mixed else MIN_BUSY
    if case.behind and case.encode_us == 0 and measured.counts.busy < least:
        missed.append(f"{case.name}: busy {measured.counts.busy:.1%}, less than {least:.0%}")
    return missed
