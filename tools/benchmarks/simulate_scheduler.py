"""Runs the real scheduler in simulated time, to show the effects of its settings on latency and throughput.

    python -m tools.benchmarks.simulate_scheduler                     # the tables of docs/dev/benchmark-notes.md
    python -m tools.benchmarks.simulate_scheduler --plots docs/images # and its plots (needs matplotlib)
    python -m tools.benchmarks.simulate_scheduler --only mixed uniform --requests 300

A model fitted to measured steps of the demo model (tools/benchmarks/step_time_model.py) gives the time of a step.
Requests arrive at random, at a rate that uses ``--load`` of the device's capacity. All random numbers are seeded.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metal_engine.request import Request
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tools.benchmarks.step_time_model import StepTimeModel, load
from tools.simulate.replicas import Replica

BLOCK_SIZE = 16
BUDGET = 512
# Share of requests, and range of prompt lengths, for small, medium and large requests.
MIXED = ((0.70, 20, 200), (0.25, 200, 1000), (0.05, 3000, 6000))
UNIFORM = ((1.0, 400, 400),)


@dataclass(frozen=True)
class Arrival:
    at: float
    num_prompt_tokens: int
    is_large: bool


@dataclass
class SimulationResult:
    """Latencies of all requests in seconds, and throughput in prompt and output tokens per second.

    ``large_ttfts`` has the times to first token of large requests only. ``itls`` are times between consecutive tokens.
    """

    ttfts: list[float]
    large_ttfts: list[float]
    itls: list[float]
    throughput: float

    def row(self) -> list[str]:
        large = f"{percentile(self.large_ttfts, 99):.1f}" if self.large_ttfts else "-"
        itl = f"{percentile(self.itls, 50):.2f} / {percentile(self.itls, 99):.2f}" if self.itls else "-"
        return [
            f"{statistics.mean(self.ttfts):.2f}",
            f"{percentile(self.ttfts, 50):.2f}",
            f"{percentile(self.ttfts, 99):.1f}",
            large,
            f"{self.throughput:.0f}",
            itl,
        ]


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[max(0, -(-int(len(values) * percent) // 100) - 1)]


def make_arrivals(
    sizes: Iterable[tuple[float, int, int]], count: int, output: int, model: StepTimeModel, load_factor: float
) -> tuple[list[Arrival], float]:
    """Return ``count`` requests with Poisson arrivals, and their rate per second.

    Args:
        sizes: (share of requests, minimum prompt length, maximum prompt length) of each kind of request.
        output: number of output tokens of each request.
        load_factor: rate as a share of the device's capacity.
    """
    rng = random.Random(0)
    sizes = list(sizes)
    drawn = [rng.choices(sizes, [s[0] for s in sizes])[0] for _ in range(count)]
    lengths = [(rng.randint(low, high), len(sizes) > 1 and low >= 1000) for _, low, high in drawn]
    # Cost of a request in a batch: its chunks fill steps, and its decodes share steps with 31 other requests.
    cost = sum(
        length / BUDGET * model.per_step
        + model.seconds(length, length * length // 2, 0)
        - model.per_step
        + (output - 1) * (model.seconds(32, 0, 32) / 32)
        for length, _ in lengths
    )
    rate = load_factor * count / cost
    at = 0.0
    arrivals = []
    for length, is_large in lengths:
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, length, is_large))
    return arrivals, rate


def simulate(arrivals: list[Arrival], output: int, model: StepTimeModel, config: SchedulerConfig) -> SimulationResult:
    """Run the scheduler until every request is done. The clock advances by the modelled time of each step."""
    scheduler = Scheduler(config, CacheConfig(block_size=BLOCK_SIZE, num_blocks=16_384))
    replica = Replica(scheduler, model)
    params = SamplingParams(max_tokens=output)
    times: dict[str, list[float]] = {}
    now, next_arrival = 0.0, 0
    while next_arrival < len(arrivals) or scheduler.has_requests:
        if not scheduler.has_requests:
            now = max(now, arrivals[next_arrival].at)
        while next_arrival < len(arrivals) and arrivals[next_arrival].at <= now:
            prompt = [1] * arrivals[next_arrival].num_prompt_tokens
            scheduler.add_request(Request(str(next_arrival), prompt, params, max_tokens=output))
            times[str(next_arrival)] = []
            next_arrival += 1
        end = replica.begin(now)
        assert end is not None  # no request waits for a store
        now = end
        for output_ in replica.end():
            times[output_.request_id].append(now)
    ttfts = [times[str(i)][0] - arrival.at for i, arrival in enumerate(arrivals)]
    return SimulationResult(
        ttfts=ttfts,
        large_ttfts=[t for t, arrival in zip(ttfts, arrivals, strict=True) if arrival.is_large],
        itls=[b - a for tokens in times.values() for a, b in itertools.pairwise(tokens)],
        throughput=replica.num_rows / (now - arrivals[0].at),
    )


def make_config(**knobs: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 128,
        "max_model_len": 8192,
        "long_prefill_token_threshold": BUDGET,
    }
    return SchedulerConfig(**{**values, **knobs})


HEADER = ["TTFT mean s", "P50", "P99", "P99 of large", "tokens/s", "ITL P50 / P99 s"]


def print_table(first: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(first + HEADER) + " |")
    print("|" + " --- |" * (len(first) + len(HEADER)))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


class Study:
    """Runs the simulations and prints their tables, for one fitted model. Keeps the plotted results in ``curves``."""

    def __init__(self, model: StepTimeModel, count: int, load_factor: float) -> None:
        self.model = model
        self.count = count
        self.load = load_factor
        self.curves: dict[str, dict[str, SimulationResult]] = {}

    def run(self, sizes: Any, output: int, **knobs: Any) -> SimulationResult:
        arrivals, _ = make_arrivals(sizes, self.count, output, self.model, self.load)
        return simulate(arrivals, output, self.model, make_config(**knobs))

    def traffic(self, name: str, sizes: Any, seqs: tuple[int, ...], aligned: tuple[bool, ...]) -> None:
        """Print two tables, for outputs of 1 and of 128 tokens. Rows differ in the settings of the scheduler.

        Args:
            name: title of the traffic.
            sizes: see :func:`make_arrivals`.
            seqs: values of ``max_num_seqs``.
            aligned: values of ``page_aligned_scheduling``. Each row also has 1, 4 or 16 concurrent prefills.
        """
        for output in (1, 128):
            rate = make_arrivals(sizes, self.count, output, self.model, self.load)[1]
            print(f"**{name}, output {output}** ({rate:.3f} requests/s, {self.load:.0%} of capacity)\n")
            rows = []
            for max_num_seqs in seqs:
                for page_aligned in aligned:
                    for partial in (1, 4, 16):
                        budget = max(BUDGET, max_num_seqs + BLOCK_SIZE) if page_aligned else BUDGET
                        result = self.run(
                            sizes,
                            output,
                            max_num_seqs=max_num_seqs,
                            max_num_partial_prefills=partial,
                            long_prefill_token_threshold=BUDGET if partial > 1 else 1 << 62,
                            page_aligned_scheduling=page_aligned,
                            max_num_batched_tokens=budget,
                        )
                        if (max_num_seqs, page_aligned) == (128, False):
                            self.curves.setdefault(f"{name}, output {output}", {})[str(partial)] = result
                        rows.append([str(max_num_seqs), "on" if page_aligned else "off", str(partial), *result.row()])
            print_table(["seqs", "aligned", "partial"], rows)

    def thresholds(self) -> None:
        print("**mixed, output 1: long threshold and how many long prompts at once** (4 partial prefills)\n")
        rows = []
        for long in (1, 2, 4):
            for factor in (0.25, 0.5, 1, 2, 4):
                threshold = int(factor * BUDGET)
                result = self.run(
                    MIXED,
                    1,
                    max_num_partial_prefills=4,
                    max_long_partial_prefills=long,
                    long_prefill_token_threshold=threshold,
                )
                self.curves.setdefault(f"thresholds, {long} long", {})[str(factor)] = result
                rows.append([str(long), f"{factor:g} x budget", *result.row()])
        print_table(["long", "threshold"], rows)

    def caps(self) -> None:
        print("**mixed, output 128: cap on attention work** (4 partial prefills)\n")
        rows = []
        for cap in (1 << 62, 2_000_000, 1_000_000, 370_000, 100_000):
            result = self.run(MIXED, 128, max_num_partial_prefills=4, max_attention_work=cap)
            rows.append(["none" if cap == 1 << 62 else f"{cap:,}", *result.row()])
        print_table(["cap"], rows)

    def plot(self, folder: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        for name, title in (
            ("mixed, output 1", "mixed-1"),
            ("mixed, output 128", "mixed-128"),
            ("uniform, output 1", "uniform-1"),
        ):
            results = self.curves.get(name)
            if results is None:
                continue
            figure, axes = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
            for partial, result in results.items():
                ordered = sorted(max(t, 1e-2) for t in result.ttfts)
                axes.plot(ordered, [(i + 1) / len(ordered) * 100 for i in range(len(ordered))], label=partial)
            axes.set(xscale="log", xlabel="time to first token, s", ylabel="% of requests", title=name)
            axes.legend(title="partial prefills")
            axes.grid(alpha=0.3)
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"ttft-{title}.png", dpi=80)
            plt.close(figure)
        if "thresholds, 1 long" in self.curves:
            figure, axes = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
            for long in (1, 2, 4):
                results = self.curves[f"thresholds, {long} long"]
                means = [statistics.mean(result.ttfts) for result in results.values()]
                axes.plot([float(f) for f in results], means, marker="o", label=str(long))
            axes.set(
                xscale="log", xlabel="long threshold / token budget", ylabel="mean TTFT, s", ylim=(0, None),
                title="mixed, output 1, 4 partial prefills",
            )  # fmt: skip
            axes.legend(title="long at once")
            axes.grid(alpha=0.3)
            figure.savefig(folder / "long-threshold.png", dpi=80)
            plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.8, help="share of the device's capacity in use (default: 0.8)")
    parser.add_argument("--only", nargs="*", choices=("mixed", "uniform", "thresholds", "caps"))
    parser.add_argument("--plots", type=Path, help="folder to write plots to")
    args = parser.parse_args()
    wanted = set(args.only or ("mixed", "uniform", "thresholds", "caps"))
    study = Study(load(), args.requests, args.load)
    print(f"{args.requests} requests, budget {BUDGET}, blocks of {BLOCK_SIZE} tokens\n")
    if "mixed" in wanted:
        study.traffic("mixed", MIXED, (128, 1024), (False, True))
    if "uniform" in wanted:
        study.traffic("uniform", UNIFORM, (128,), (False,))
    if "thresholds" in wanted:
        study.thresholds()
    if "caps" in wanted:
        study.caps()
    if args.plots is not None:
        study.plot(args.plots)


if __name__ == "__main__":
    main()
