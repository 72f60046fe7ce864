"""Converts outputs, metrics, adapters and errors to messages and back (:mod:`metal_engine.engine.process.wire`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from metal_engine.cancellation import Cancelled
from metal_engine.engine.metrics import EngineMetrics, Histogram
from metal_engine.engine.process.wire import LoadedAdapter, Logprobs, MetricsSnapshot, Output, checked
from metal_engine.errors import (
    AdapterError,
    ConfigError,
    ModelLoadError,
    OverloadedError,
    ParameterError,
    UnsupportedModelError,
)
from metal_engine.grammars.compiler import GrammarRefusedError
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.lora_adapter import Adapter
from metal_engine.request import RequestOutput, TokenLogprobs
from metal_engine.scheduling.stats import SchedulerStats

# Types of errors, subclasses first, and the attributes that are their arguments. An empty name stands for the message.
_ERRORS: dict[type[Exception], tuple[str, ...]] = {
    GrammarRefusedError: ("message", "seconds"),
    ParameterError: ("name", "message"),
    AdapterError: ("", "param"),
    ConfigError: ("flag", ""),
    OverloadedError: ("",),
    UnsupportedModelError: ("",),
    ModelLoadError: ("",),
    Cancelled: (),
    RuntimeError: ("",),
}
_ERROR_TYPES = {kind.__name__: kind for kind in _ERRORS}


def packed_output(output: RequestOutput) -> Output:
    """Return the part of an output that the engine fills in."""
    return Output(
        output.request_id,
        output.token_ids,
        output.num_cached_tokens,
        output.num_external_tokens,
        output.num_predicted_tokens,
        output.finish_reason,
        output.stop_reason,
        None if output.error is None else printable(output.error),
        output.caused_by_request,
        None if output.logprobs is None else [_packed_logprobs(one) for one in output.logprobs],
        None
        if output.prompt_logprobs is None
        else [None if one is None else _packed_logprobs(one) for one in output.prompt_logprobs],
        None if output.pooled is None else output.pooled.astype(np.float32, copy=False).tobytes(),
    )


def unpacked_output(output: Output) -> RequestOutput:
    """Return the output of :func:`packed_output`. Raises WireError."""
    found = RequestOutput(
        output.request_id,
        output.token_ids,
        output.num_cached_tokens,
        output.num_external_tokens,
        output.num_predicted_tokens,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        error=output.error,
        caused_by_request=output.caused_by_request,
    )
    if output.logprobs is not None:
        found.logprobs = [TokenLogprobs(*one) for one in output.logprobs]
    if output.prompt_logprobs is not None:
        found.prompt_logprobs = [None if one is None else TokenLogprobs(*one) for one in output.prompt_logprobs]
    if output.pooled is not None:
        with checked():
            found.pooled = np.frombuffer(output.pooled, np.float32)
    return found


def _packed_logprobs(one: TokenLogprobs) -> Logprobs:
    return one.token_id, one.logprob, one.rank, one.top


def packed_metrics(metrics: EngineMetrics) -> MetricsSnapshot:
    """Return a snapshot of metrics. Another thread may be changing them."""
    kv_transfer = metrics.kv_transfer
    snapshot = MetricsSnapshot(
        {}, {}, {}, {}, metrics.replay_refusal, None if kv_transfer is None else kv_transfer.as_dict()
    )
    for name, value in vars(metrics).items():
        if isinstance(value, int | float):
            snapshot.counts[name] = value
        elif isinstance(value, Histogram):
            snapshot.histograms[name] = list(value.counts), value.sum
        elif isinstance(value, list):
            snapshot.by_position[name] = list(value)
        elif isinstance(value, dict) and name != "_times":
            snapshot.by_label[name] = dict(value)
    return snapshot


# Attributes of SchedulerStats that count since the start of an engine.
_COUNTS = ("num_preemptions", "checkpoint_hits", "checkpoint_evictions", "images_encoded", "image_cache_hits")


class MetricsTotals:
    """Sums of the metrics and stats of consecutive engines, which each count from 0.

    Args:
        metrics: metrics that receive the sums.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self.begin_engine()

    def begin_engine(self, stats: SchedulerStats | None = None) -> None:
        """Keep the current sums as the totals of earlier engines, to which the snapshots of a new engine are added.

        Args:
            stats: last result of :meth:`add_stats` for the previous engine; None for the first engine.
        """
        self._before = packed_metrics(self._metrics)
        self._stats_before = stats

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """Return the stats of the current engine, with the counts of earlier engines added."""
        before = self._stats_before
        if before is None:
            return stats
        sums = {name: getattr(before, name) + getattr(stats, name) for name in _COUNTS}
        return replace(stats, peak_used_blocks=max(before.peak_used_blocks, stats.peak_used_blocks), **sums)

    def update(self, snapshot: MetricsSnapshot) -> None:
        """Set the sums to the totals of earlier engines plus the current values of this engine. Raises WireError.

        Args:
            snapshot: result of :func:`packed_metrics` for this engine.
        """
        metrics, before = self._metrics, self._before
        with checked():
            for name, value in snapshot.counts.items():
                setattr(metrics, name, before.counts[name] + value)
            for name, values in snapshot.by_label.items():
                sums = Counter(before.by_label[name])
                sums.update(values)  # keeps zeros, which `+` drops
                setattr(metrics, name, sums)
            for name, counts in snapshot.by_position.items():
                setattr(metrics, name, _sums(before.by_position[name], counts))
            for name, (counts, total) in snapshot.histograms.items():
                counts_before, total_before = before.histograms[name]
                histogram = getattr(metrics, name)
                histogram.counts, histogram.sum = _sums(counts_before, counts), total_before + total
            metrics.replay_refusal = snapshot.replay_refusal
            if snapshot.kv_transfer is not None:
                sums = Counter(before.kv_transfer or {})
                sums.update(snapshot.kv_transfer)
                kv_transfer = KVTransferStats()
                kv_transfer.add(**sums)
                metrics.kv_transfer = kv_transfer  # other threads read only complete sums


def _sums(before: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(before, more, fillvalue=0)]


def packed_adapter(adapter: Adapter) -> LoadedAdapter:
    """Return an adapter as a part of a message."""
    return LoadedAdapter(**vars(adapter))


def packed_error(error: BaseException) -> list[str | None]:
    """Return the type and the arguments of an error, e.g. ``["AdapterError", "no such adapter", "lora_name"]``.

    The type becomes RuntimeError if ``_ERRORS`` has neither the error's type nor a base class of it.
    """
    for kind, names in _ERRORS.items():
        if isinstance(error, kind):
            values = [getattr(error, name) if name else str(error) for name in names]
            return [kind.__name__, *(value if value is None else printable(str(value)) for value in values)]
    return ["RuntimeError", printable(f"{type(error).__name__}: {error}")]


def unpacked_error(fields: list[str | None]) -> Exception:
    """Return, without raising it, the error that :func:`packed_error` has packed. Raises WireError."""
    with checked():
        kind, *arguments = fields
        if kind == GrammarRefusedError.__name__:
            problem, seconds = arguments
            return GrammarRefusedError(problem or "", float(seconds or "nan"))
        return _ERROR_TYPES[kind or ""](*arguments)


def printable(text: str) -> str:
    """Return a text without lone surrogates, which UTF-8 cannot have."""
    return text.encode("utf-8", "backslashreplace").decode()
