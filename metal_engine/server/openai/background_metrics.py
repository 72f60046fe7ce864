"""Metrics of stored responses and of responses in the background."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.openai.background import BackgroundResponses
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.server.status.metrics import PREFIX

_UNFINISHED = ("queued", "in_progress")
_ENDED = ("completed", "incomplete", "failed", "cancelled")


class BackgroundMetrics(Collector):
    """Creates the metrics of stored and background responses when ``/metrics`` is requested."""

    def __init__(self, models: ModelProvider, background: BackgroundResponses, store: ResponseStore) -> None:
        self._models = models
        self._background = background
        self._store = store

    def describe(self) -> Iterator[Metric]:
        """Return no metrics. Without this method, the registry would collect once on registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        unfinished: Counter[tuple[str, str]] = Counter((one.model, one.status) for one in self._background.unfinished)
        help_ = "Responses in the background that have not ended, by status."
        yield self._by_status(GaugeMetricFamily, "background_responses", help_, unfinished, _UNFINISHED)
        help_ = "Responses in the background that ended, by status."
        ended = self._background.num_ended
        yield self._by_status(CounterMetricFamily, "background_responses_ended", help_, ended, _ENDED)
        help_ = "Stored responses that were dropped because of newer ones."
        family = CounterMetricFamily(f"{PREFIX}stored_responses_dropped", help_, labels=["model_name"])
        for model in self._with_loaded(self._store.num_dropped):
            family.add_metric([model], self._store.num_dropped[model])
        yield family

    def _by_status(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help_: str,
        counts: Counter[tuple[str, str]],
        statuses: tuple[str, ...],
    ) -> Metric:
        family = kind(PREFIX + name, help_, labels=["model_name", "status"])
        for model in self._with_loaded({model: 1 for model, _ in counts}):
            for status in statuses:
                family.add_metric([model, status], counts[model, status])
        return family

    def _with_loaded(self, counts: Mapping[str, int]) -> list[str]:
        """Return the names of the loaded models and of the models in ``counts``, each once."""
        return list(dict.fromkeys([*(served.names[0] for served in self._models.loaded), *counts]))
