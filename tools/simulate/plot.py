"""Plots TTFT and hit rate over the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.benchmarks.simulate_scheduler import percentile
from tools.simulate.summary import SimulationSummary


def plot_replicas(summaries: Mapping[str, Mapping[int, SimulationSummary]], path: Path) -> None:
    """Draw the figures of all policies to a file. ``summaries`` is by policy and number of replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (median, tail, hits) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for policy, by_count in summaries.items():
        counts = list(by_count)
        for axes, percent in ((median, 50), (tail, 99)):
            axes.plot(counts, [percentile(s.ttfts, percent) for s in by_count.values()], marker="o", label=policy)
        hits.plot(counts, [s.hit_rate * 100 for s in by_count.values()], marker="o", label=policy)
    first = next(iter(summaries.values()))
    hits.plot(list(first), [s.possible * 100 for s in first.values()], color="black", ls=":", label="possible")
    median.set(ylabel="TTFT, median, s", yscale="log")
    tail.set(ylabel="TTFT, 99th percentile, s", yscale="log")
    hits.set(ylabel="prompt tokens from a cache, %", ylim=(0, 100))
    for axes in (median, tail):
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    for axes in (median, tail, hits):
        axes.set(xscale="log", xlabel="replicas, at the same load each")
        axes.set_xticks(list(first), [str(count) for count in first])
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    hits.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)
