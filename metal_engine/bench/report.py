"""Writes the summary of a run as text and to files.

Output files are checked before a benchmark runs, so that a wrong file name does not waste a long run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from metal_engine.bench.stats import Summary
from metal_engine.errors import ConfigError

WIDTH = 58


def table(summary: Summary) -> str:
    """Format ``summary`` like vLLM's benchmark. For embeddings, leave out figures about output tokens."""
    embeds = bool(summary.num_ok) and not summary.output_tokens
    figures: list[tuple[str, float | str | None]] = [
        ("Successful requests:", summary.num_ok),
        ("Failed requests:", summary.num_failed),
        ("Benchmark duration (s):", summary.duration),
        ("Total input tokens:", summary.input_tokens),
        ("Cached input tokens:", summary.cached_tokens or None),
        ("Image tokens:", summary.image_tokens or None),
        ("Total generated tokens:", None if embeds else summary.output_tokens),
        ("Request throughput (req/s):", summary.request_throughput),
        ("Request goodput (req/s):", summary.goodput),
        ("Output token throughput (tok/s):", None if embeds else summary.output_throughput),
        ("Total token throughput (tok/s):", summary.total_throughput),
        ("Peak concurrent requests:", summary.peak_concurrency),
        ("Peak memory of the server (MiB):", None if (peak := summary.server_peak_bytes) is None else peak / (1 << 20)),
        ("KV cache dtype of the server:", summary.kv_cache_dtype),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_line(label, value) for label, value in figures if value is not None]
    distributions = (
        ("Time to First Token", "TTFT", summary.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", summary.tpot),
        ("Inter-token Latency", "ITL", summary.itl),
        ("End-to-end Latency", "E2EL", summary.e2el),
    )
    for heading, name, distribution in distributions[3 if embeds else 0 :]:
        lines.append(heading.center(WIDTH, "-"))
        lines.append(_line(f"Mean {name} (ms):", distribution.mean))
        lines.append(_line(f"Median {name} (ms):", distribution.median))
        lines += [_line(f"P{p:g} {name} (ms):", value) for p, value in distribution.percentiles.items()]
    if (counts := summary.speculation) is not None:
        lines.append("Speculative Decoding".center(WIDTH, "-"))
        lines.append(_line("Acceptance rate (%):", counts.acceptance_rate))
        lines.append(_line("Acceptance length:", counts.acceptance_length))
        lines.append(_line("Drafts:", counts.num_drafts))
        lines.append(_line("Draft tokens:", counts.num_draft_tokens))
        lines.append(_line("Accepted tokens:", counts.num_accepted_tokens))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _line(label: str, value: float | str) -> str:
    shown = str(value) if isinstance(value, int | str) else f"{value:.2f}"
    return f"{label:<42}{shown:>{WIDTH - 42}}"


def check_output(path: str | None, flag: str) -> None:
    """Check that a file can be written, and make its folder. Does nothing for None.

    Args:
        flag: flag that names the file, for the message.

    Raises:
        ConfigError: the file could not be written.
    """
    if path is None:
        return
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(flag, f"cannot write to {folder} ({flag}): {error.strerror}") from error
    if Path(path).is_dir():
        raise ConfigError(flag, f"must name a file, and {path} is a folder")


def write_json(path: str, result: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
