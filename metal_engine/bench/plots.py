"""Plots a run: latencies, requests over time, and the rate of events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metal_engine.bench.client import RequestRecord
from metal_engine.errors import ConfigError


def check_plots(path: str) -> None:
    """Raise ConfigError if matplotlib is not installed, or does not support the file type."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError as error:
        raise ConfigError("--plot", "needs matplotlib: pip install 'metal-engine[plots]'") from error
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise ConfigError("--plot", f"must be a file of a supported type, such as run.png, got {path!r}")


def plot_run(records: Sequence[RequestRecord], path: Path) -> None:
    """Write a plot of the successful requests to ``path``.

    Its three panels are distributions of TTFT and ITL, a timeline of requests, and events with text per second.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ok = [record for record in records if record.ok]
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    latencies, timeline, rate = figure.subplots(1, 3)
    for label, values in (("TTFT", [r.ttft for r in ok]), ("ITL", [i for r in ok for i in r.itls])):
        if values:
            ordered = np.sort(values) * 1e3
            latencies.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=label)
    latencies.set(xlabel="ms", ylabel="share at most this", xscale="log", title="Latencies")
    if ok:
        latencies.legend()

    start = min((r.started for r in records), default=0.0)
    for place, record in enumerate(sorted(ok, key=lambda r: r.started)):
        first, last = record.token_times[0] - start, record.token_times[-1] - start
        timeline.plot([record.started - start, first], [place, place], color="tab:orange", linewidth=1.5)
        timeline.plot([first, last], [place, place], color="tab:blue", linewidth=1.5)
    timeline.set(xlabel="s", ylabel="request", title="Waiting for the first token, generating")

    times = np.array([t for r in ok for t in r.token_times]) - start
    if times.size:
        counts, edges = np.histogram(times, bins=min(60, max(5, times.size // 4)))
        rate.stairs(counts / np.diff(edges), edges, fill=True)
    rate.set(xlabel="s", ylabel="events with text / s", title="Output")
    figure.savefig(path, dpi=110)
