"""``/metrics`` in the Prometheus format. The names are vLLM's, with the prefix ``metal_engine:``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from metal_engine import __version__
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.metrics import EngineMetrics, Histogram
from metal_engine.model_pool.model_entry import ModelEntry
from metal_engine.server.generation.model_provider import ModelProvider, MultiModel
from metal_engine.settings.config import TEXT_ONLY

PREFIX = "metal_engine:"
VLLM_PREFIX = "vllm:"

# Reasons for which a request never reached the engine.
REJECTIONS = ("invalid", "unauthorized", "too_large", "not_found", "overloaded", "shutting_down")
_BY_STATUS = {
    **dict.fromkeys((400, 405, 415, 422), "invalid"),
    **dict.fromkeys((401, 403), "unauthorized"),
    404: "not_found",
    413: "too_large",
}

_COUNTERS: dict[str, tuple[str, Callable[[EngineMetrics], float]]] = {
    "prompt_tokens": ("Prompt tokens of requests that were begun.", lambda m: m.num_prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda m: m.num_generation_tokens),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda m: m.num_cache_queries),
    "prefix_cache_hits": ("Tokens found in the prefix cache.", lambda m: m.num_cache_hits),
}
_HISTOGRAMS: dict[str, tuple[str, Callable[[EngineMetrics], Histogram]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", lambda m: m.first_token),
    "inter_token_latency_seconds": ("Between two tokens of a request.", lambda m: m.inter_token),
    "e2e_request_latency_seconds": ("From arrival to the last token.", lambda m: m.end_to_end),
    "request_queue_time_seconds": ("From arrival to the first step.", lambda m: m.queue),
    "request_prefill_time_seconds": ("From the first step to the first token.", lambda m: m.prefill),
    "request_decode_time_seconds": ("From the first token to the last.", lambda m: m.decode),
    "request_inference_time_seconds": ("From the first step to the last token.", lambda m: m.inference),
    "request_prompt_tokens": ("Prompt lengths of requests that finished.", lambda m: m.prompt_tokens),
    "request_generation_tokens": ("Output lengths of requests that finished.", lambda m: m.generation_tokens),
    "iteration_tokens_total": ("Packed rows of each step.", lambda m: m.step_tokens),
    "step_time_seconds": ("From planning a step to its tokens.", lambda m: m.step_time),
}


class ServerMetrics:
    """Metrics of one server for ``/metrics``.

    Every series has the label ``model_name``, the model's name in the API, except the series about the process.
    """

    def __init__(self, models: ModelProvider) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        help_, labels = "Requests that never reached the engine.", ["model_name", "reason"]
        self._rejections = Counter(f"{PREFIX}requests_rejected", help_, labels, registry=self._registry)
        # Model label for requests that were rejected before their model was determined.
        self._model = "" if isinstance(models, MultiModel) else models.names[0]
        for reason in REJECTIONS:
            self._rejections.labels(self._model, reason)
        self._registry.register(_ModelsCollector(models))

    def add(self, collector: Collector) -> None:
        """Add the families of a collector, whose series have the label ``model_name``."""
        self._registry.register(collector)

    def reject(self, status: int, code: str | None, model: str | None = None) -> None:
        """Count a rejected request under a reason of ``REJECTIONS``. Do nothing for a status without a reason.

        Args:
            status: HTTP status of the response. It determines the reason, except for 503.
            code: code of the error. For status 503, it is the reason.
            model: name of the request's model; None if the model was not determined.
        """
        reason = code if status == 503 and code in ("overloaded", "shutting_down") else _BY_STATUS.get(status)
        if reason is not None:
            self._rejections.labels(model or self._model, reason).inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that the ``Accept`` header ``accept`` requests, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _ModelsCollector(Collector):
    """Reads the engines' counters when metrics are requested. Nothing is copied while requests run."""

    def __init__(self, models: ModelProvider) -> None:
        self._models = models

    def describe(self) -> Iterator[Metric]:
        """Return no metrics. Without this method, the registry would collect once on registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for served in self._models.loaded:
            for family in _EngineReader(served.engine, served.names[0]).families():
                # The format requires all series of a family to be in one place.
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
        if isinstance(self._models, MultiModel):
            yield from _registry_families(self._models)


def _registry_families(models: MultiModel) -> Iterator[Metric]:
    kinds: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[ModelEntry], float]], ...] = (
        (
            GaugeMetricFamily,
            "model_loaded",
            "1 if the model is loaded, else 0.",
            lambda one: one.loaded_engine is not None,
        ),
        (
            GaugeMetricFamily,
            "model_memory_bytes",
            "Memory reserved for the model, in bytes.",
            lambda one: one.num_bytes,
        ),
        (CounterMetricFamily, "model_loads", "Number of times the model was loaded.", lambda one: one.num_loads),
    )
    for kind, name, help_, value in kinds:
        family = kind(PREFIX + name, help_, labels=["model_name"])
        for entry in models.registry.entries:
            family.add_metric([entry.name], float(value(entry)))
        yield family


class _EngineReader:
    """Reads the counters of one engine. ``model`` is the label of the series."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._model = model

    def families(self) -> Iterator[Metric]:
        """Yield each family with the series of this model."""
        stats, metrics = self._engine.stats, self._engine.metrics
        yield from self._loads()
        for name, (help_, value) in _COUNTERS.items():
            yield self._counter(name, help_, value(metrics))
        yield self._counter("num_preemptions", "Requests that lost their KV blocks.", stats.num_preemptions)
        if stats.num_state_slots:
            yield self._gauge("checkpoints", "Saved recurrent states of cached prefixes.", stats.num_checkpoints)
            yield self._counter(
                "checkpoint_hits", "Requests that resumed from a state checkpoint.", stats.checkpoint_hits
            )
            yield self._counter(
                "checkpoint_evictions", "State checkpoints that were evicted.", stats.checkpoint_evictions
            )
        yield self._counter("failed_steps", "Steps that raised.", metrics.num_failed_steps)
        help_ = "Requests of failed steps that were computed again."
        yield self._counter("retried_requests", help_, metrics.num_retried_requests)
        if any(metrics.restart.counts):
            help_ = "Requests that continued in a new process of the engine."
            yield self._counter("resumed_requests", help_, metrics.num_resumed_requests)
            help_ = "Time from the end of the engine's process to the continuation of its requests."
            yield self._histogram("restart_seconds", help_, metrics.restart)
        yield self._counter(
            "late_masks", "Rows computed again because their grammar masks were late.", metrics.num_late_masks
        )
        help_ = "Tool calls whose grammars failed, so that their text was not constrained."
        yield self._counter("unconstrained_calls", help_, metrics.num_unconstrained_calls)
        if self._engine.config.scheduler.async_scheduling:
            help_ = "Steps by planning time: during the previous step (ahead), or after its end."
            yield self._by_label("steps", help_, "planned", dict(metrics.num_steps))
        if self._engine.config.cache.num_padding_blocks:
            help_ = "Decode-only steps by forward pass: replayed, or the reason why the graph was built."
            yield self._by_label("decode_steps", help_, "forward", dict(metrics.num_decode_forwards))
        if self._engine.config.model.own_caches_reason:
            help_ = "0 if the requests of a step run one after another over mlx-lm's own caches."
            yield self._gauge("packed_requests", help_, 0)
        if (refusal := self._engine.config.model.image_refusal) != TEXT_ONLY:
            yield from self._images(refusal, metrics)
        if self._engine.config.scheduler.speculative is not None:
            yield from self._speculation(metrics)
        ended = dict(metrics.num_finished)
        yield self._by_label("request_success", "Requests that ended, by reason.", "finished_reason", ended)
        transfer = metrics.kv_transfer
        for name, count in transfer.as_dict().items() if transfer is not None else ():
            yield self._counter(f"kv_transfer_{name}", "KV transfer, see docs/several-macs.md.", count)
        layers, help_ = self._engine.config.attention_layers, "Layers by the kernel that computes their attention."
        family = GaugeMetricFamily(PREFIX + "attention_layers", help_, labels=["model_name", "kernel"])
        family.add_metric([self._model, "metal"], layers.metal)
        family.add_metric([self._model, "portable"], layers.portable)
        yield family
        if self._engine.config.model.has_index:
            help_ = "1 if Metal kernels select the keys of the model's index, 0 if MLX's operations do."
            yield self._gauge("index_kernels", help_, int(bool(layers.metal) and not layers.no_index_kernels))
        yield self._by_label("step_rows", "Rows of packed steps, by kind.", "kind", dict(metrics.num_rows))
        for name, (help_, histogram) in _HISTOGRAMS.items():
            yield self._histogram(name, help_, histogram(metrics))
        yield self._info()

    def _loads(self) -> Iterator[Metric]:
        """Yield the metrics that load balancers use, under this server's names and under vLLM's names."""
        stats = self._engine.stats
        usage = stats.num_used_blocks / stats.num_blocks
        for prefix in (PREFIX, VLLM_PREFIX):
            yield self._gauge("num_requests_running", "Requests in the batch.", stats.num_running, prefix)
            yield self._gauge("num_requests_waiting", "Requests in the queue.", self._engine.num_waiting, prefix)
            yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", usage, prefix)

    def _images(self, refusal: str | None, metrics: EngineMetrics) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._gauge("image_input", "1 if prompts may have images, 0 if they are refused.", refusal is None)
        yield self._counter("images_encoded", "Images whose features were computed.", stats.images_encoded)
        help_ = "Time that the device took for encoding images."
        yield self._counter("image_encode_seconds", help_, metrics.image_encode_seconds)
        help_ = "Images whose features were kept when a request needed them."
        yield self._counter("image_cache_hits", help_, stats.image_cache_hits)

    def _speculation(self, metrics: EngineMetrics) -> Iterator[Metric]:
        accepted = list(metrics.num_accepted_tokens)
        yield self._counter("spec_decode_num_drafts", "Proposals: a request's in a step.", metrics.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens proposed.", metrics.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.", sum(accepted))
        by_position = {str(position): count for position, count in enumerate(accepted)}
        help_ = "Proposed tokens that were accepted, by their position in the proposal."
        yield self._by_label("spec_decode_num_accepted_tokens_per_pos", help_, "position", by_position)
        help_ = "Proposed tokens without a grammar mask for the next token, because masks took too long."
        yield self._counter("spec_decode_num_unmasked_tokens", help_, metrics.num_unmasked_tokens)

    def _gauge(self, name: str, help_: str, value: float, prefix: str = PREFIX) -> Metric:
        family = GaugeMetricFamily(prefix + name, help_, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by_label(self, name: str, help_: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_, labels=["model_name", label])
        for of_label, value in values.items():
            family.add_metric([self._model, of_label], value)
        return family

    def _histogram(self, name: str, help_: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help_, labels=["model_name"])
        bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
        # The engine continues meanwhile, so the count comes from the same copy as the buckets.
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([self._model], buckets, histogram.sum)
        return family

    def _info(self) -> Metric:
        config = self._engine.config
        family = InfoMetricFamily(
            f"{PREFIX}engine", "Version, model type and main settings of the engine.", labels=["model_name"]
        )
        settings = {
            "version": __version__,
            "model_type": config.model.model_type,
            "dtype": config.model.dtype,
            "device": config.device.kind,
            "attention_backend": config.attention_backend,
            "kv_cache_dtype": config.model.kv_dtype,
            "block_size": str(config.cache.block_size),
            "num_blocks": str(config.cache.num_blocks),
            "max_model_len": str(config.scheduler.max_model_len),
            "max_num_seqs": str(config.scheduler.max_num_seqs),
            "max_num_batched_tokens": str(config.scheduler.max_num_batched_tokens),
        }
        family.add_metric([self._model], settings)
        return family
