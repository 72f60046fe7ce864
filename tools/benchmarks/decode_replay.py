"""Measures the host time saved by replaying decode steps, with 32 requests on the demo model.

    python -m tools.benchmarks.decode_replay
    python -m tools.benchmarks.decode_replay --requests 8 --steps 120

Engines that build the graph of each step in Python alternate with engines that replay traced steps. Times are CPU time
of the engine's thread, without the device's work: on a CPU, MLX computes in other threads.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from tools.benchmarks.profile_decode_step import Answers

TURNS = 6
MODES = [("built", "never"), ("replayed", "always")]


def measure(engines: dict[tuple[str, bool], Answers], num_steps: int) -> dict[tuple[str, bool], list[float]]:
    """Return the times of each engine's steps in microseconds. Engines run a few steps at a time in rotation.

    The key of an engine is (``built`` or ``replayed``, True if it plans one step ahead).
    """
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in engines}
    for turn in range(TURNS):
        for key in engines if turn % 2 else reversed(engines):
            gc.collect()
            gc.disable()
            for _ in range(num_steps // TURNS):
                start = time.thread_time()
                engines[key].step()
                times[key].append(1e6 * (time.thread_time() - start))
            gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=120, help="timed steps of each engine")
    args = parser.parse_args()
    if args.steps < TURNS:
        parser.error(f"--steps must be at least {TURNS}, one for each round")

    engines = {
        (name, ahead): Answers(args.model, args.requests, args.steps, ahead, replay)
        for name, replay in MODES
        for ahead in (False, True)
    }
    times = measure(engines, args.steps)
    print(f"{args.requests} requests, {args.steps // TURNS * TURNS} steps; us of the engine's thread in a step.\n")
    print("| | built, median (quartile) | replayed | ratio of medians | replayed steps |")
    print("| --- | --- | --- | --- | --- |")
    for ahead in (False, True):
        by_name = {name: sorted(times[name, ahead]) for name, _ in MODES}
        cells = [f"{statistics.median(t):,.0f} ({t[len(t) // 4]:,.0f})" for t in by_name.values()]
        ratio = statistics.median(by_name["replayed"]) / statistics.median(by_name["built"])
        forwards = engines["replayed", ahead].core.metrics.num_decode_forwards
        share = forwards["replayed"] / forwards.total()
        print(f"| {'one ahead' if ahead else 'one by one'} | {cells[0]} | {cells[1]} | {ratio:.2f} | {share:.0%} |")


if __name__ == "__main__":
    main()
