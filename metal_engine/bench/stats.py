"""Computes the summary of a run from the records of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from typing import Any

import numpy as np

from metal_engine.bench.client import RequestRecord
from metal_engine.bench.server_metrics import SpecDecodeCounts

MILLISECONDS = 1e3


@dataclass(frozen=True)
class Distribution:
    """Distribution of times in milliseconds. ``percentiles`` maps a percentile, e.g. 99.0, to its value."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float] = field(default_factory=dict)

    @staticmethod
    def of(seconds: Iterable[float], percentiles: Sequence[float]) -> Distribution:
        """Describe times given in seconds. All values are NaN if there are no times."""
        values = np.array([*seconds] or [nan]) * MILLISECONDS
        return Distribution(
            mean=float(values.mean()),
            median=float(np.median(values)),
            std=float(values.std()),
            percentiles={p: float(np.percentile(values, p)) for p in percentiles},
        )


@dataclass(frozen=True)
class Summary:
    """Summary of a run. Throughputs are per second of ``duration``.

    ``duration`` is the time in seconds from sending the first request to the last text of a successful request. Tokens
    and times are those of successful requests.
    """

    num_ok: int
    num_failed: int
    duration: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution
    goodput: float | None = None  # requests per second that meet all limits; None without limits
    peak_concurrency: int = 0
    server_peak_bytes: int | None = None
    speculation: SpecDecodeCounts | None = None
    kv_cache_dtype: str | None = None  # type of the server's KV cache, if known
    image_tokens: int = 0  # number of image tokens among the input tokens

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a JSON file. Times have names such as ``p99_ttft_ms``. NaN becomes None."""
        result = asdict(self)
        for name in ("ttft", "tpot", "itl", "e2el"):
            distribution = result.pop(name)
            for p, value in distribution.pop("percentiles").items():
                distribution[f"p{p:g}"] = value
            # JSON has no NaN.
            result |= {f"{key}_{name}_ms": None if isnan(v) else v for key, v in distribution.items()}
        return result


def summarize(
    records: Sequence[RequestRecord],
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
    server_peak_bytes: int | None = None,
    speculation: SpecDecodeCounts | None = None,
    kv_cache_dtype: str | None = None,
) -> Summary:
    """Return the summary of a run.

    Only ``num_failed``, ``peak_concurrency`` and the start of ``duration`` take failed requests into account.

    Args:
        percentiles: percentiles of each distribution, from 0 to 100.
        goodput: map from ``ttft``, ``tpot`` or ``e2el`` to its maximum in milliseconds for a good request. If it is
            None or empty, the summary has no goodput.
        server_peak_bytes: peak memory of the server in bytes; None if unknown.
        speculation: the server's counts of speculation during the run; None if the server does not report them.
        kv_cache_dtype: type in which the server stores keys and values; None if unknown.
    """
    ok = [record for record in records if record.ok]
    duration = max(r.token_times[-1] for r in ok) - min(r.started for r in records) if ok else 0.0
    input_tokens, output_tokens = sum(r.prompt_len for r in ok), sum(r.output_len for r in ok)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return Summary(
        num_ok=len(ok),
        num_failed=len(records) - len(ok),
        duration=duration,
        input_tokens=input_tokens,
        cached_tokens=sum(r.cached_len for r in ok),
        output_tokens=output_tokens,
        request_throughput=rate(len(ok)),
        output_throughput=rate(output_tokens),
        total_throughput=rate(input_tokens + output_tokens),
        ttft=Distribution.of((r.ttft for r in ok), percentiles),
        tpot=Distribution.of((r.tpot for r in ok if r.output_len > 1), percentiles),
        itl=Distribution.of((itl for r in ok for itl in r.itls), percentiles),
        e2el=Distribution.of((r.latency for r in ok), percentiles),
        goodput=rate(sum(_is_good(r, goodput) for r in ok)) if goodput else None,
        peak_concurrency=peak_concurrency(records),
        server_peak_bytes=server_peak_bytes,
        speculation=speculation,
        kv_cache_dtype=kv_cache_dtype,
        image_tokens=sum(r.image_len for r in ok),
    )


def _is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    values = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
    return all(values[name] * MILLISECONDS <= limit for name, limit in limits.items())


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the maximum number of requests in flight at once.

    If a request ends at the time when another starts, the two do not overlap.
    """
    changes = sorted([(r.started, 1) for r in records] + [(r.ended, -1) for r in records])
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0
