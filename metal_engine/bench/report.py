"""A run's figures as text."""

from __future__ import annotations

from metal_engine.bench.stats import Distribution, Summary

WIDTH = 58


def table(summary: Summary) -> str:
    """Lays figures out as vLLM's benchmark does."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines.append(_line("Successful requests:", summary.num_ok))
    lines.append(_line("Failed requests:", summary.num_failed))
    lines.append(_line("Benchmark duration (s):", summary.duration))
    lines.append(_line("Total input tokens:", summary.input_tokens))
    if summary.cached_tokens:
        lines.append(_line("Cached input tokens:", summary.cached_tokens))
    lines.append(_line("Total generated tokens:", summary.output_tokens))
    lines.append(_line("Request throughput (req/s):", summary.request_throughput))
    if summary.goodput is not None:
        lines.append(_line("Request goodput (req/s):", summary.goodput))
    lines.append(_line("Output token throughput (tok/s):", summary.output_throughput))
    lines.append(_line("Total token throughput (tok/s):", summary.total_throughput))
    lines.append(_line("Peak concurrent requests:", summary.peak_concurrency))
    if summary.server_peak_bytes is not None:
        lines.append(_line("Peak memory of the server (MiB):", summary.server_peak_bytes / (1 << 20)))
    for heading, name, distribution in (
        ("Time to First Token", "TTFT", summary.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", summary.tpot),
        ("Inter-token Latency", "ITL", summary.itl),
        ("End-to-end Latency", "E2EL", summary.e2el),
    ):
        lines.append(heading.center(WIDTH, "-"))
        lines += _lines_of(name, distribution)
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _lines_of(name: str, distribution: Distribution) -> list[str]:
    lines = [_line(f"Mean {name} (ms):", distribution.mean), _line(f"Median {name} (ms):", distribution.median)]
    return lines + [_line(f"P{p:g} {name} (ms):", value) for p, value in distribution.percentiles.items()]


def _line(label: str, value: float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<42}{shown:>{WIDTH - 42}}"
