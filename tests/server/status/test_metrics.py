"""/metrics uses vLLM's names, the dashboard uses only existing metrics, and logs name requests."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.parser import text_string_to_metric_families

from metal_engine.cli.banner import startup_rows
from metal_engine.engine.metrics import Histogram
from metal_engine.server.logs import JSONFormatter, RequestIdFilter, current_request
from metal_engine.server.status.stats_log import StatsLog
from metal_engine.settings.config import AttentionLayers, CommandBufferLimits
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import MODEL, Served, serve, wait_until
from tools.docs import dashboard
from tools.fixtures.fake_engine import byte_ids, fake_config

# vLLM's names from its documentation of the V1 engine, without `vllm:`.
VLLM_NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "iteration_tokens_total_bucket", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "request_success_total",
}  # fmt: skip


def scrape(served: Served) -> dict[str, dict[tuple[str, ...], float]]:
    """Return sample name without the prefix -> values of all labels except the model's -> value."""
    text = httpx.get(served.url + "/metrics").text
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("metal_engine:"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == MODEL
                samples.setdefault(sample.name.removeprefix("metal_engine:"), {})[tuple(labels.values())] = sample.value
    return samples


def value(samples: dict[str, dict[tuple[str, ...], float]], name: str, *labels: str) -> float:
    return samples[name][labels]


def test_names(served: Served) -> None:
    assert scrape(served).keys() >= VLLM_NAMES


def test_loads() -> None:
    """Some gateways read only vLLM's own names of them."""
    with serve(config=fake_config(max_num_seqs=2)) as served:
        served.runner.running.clear()
        create = served.client().completions.create
        streams = [create(model=MODEL, prompt="a" * 20, max_tokens=5, stream=True) for _ in range(5)]
        wait_until(lambda: served.engine.num_open_requests == 5, "all requests")
        wait_until(lambda: served.engine.stats.num_running >= 1, "one to run")
        ours = scrape(served)
        families = text_string_to_metric_families(httpx.get(served.url + "/metrics").text)
        theirs = {s.name: s for family in families for s in family.samples if s.name.startswith("vllm:")}
        running = value(ours, "num_requests_running")
        loads = {"num_requests_running": running, "num_requests_waiting": 5 - running}
        loads["kv_cache_usage_perc"] = 3 * running / 256
        assert running in (1, 2) and {name: value(ours, name) for name in loads} == loads
        assert {name: sample.value for name, sample in theirs.items()} == {f"vllm:{n}": v for n, v in loads.items()}
        assert all(sample.labels == {"model_name": MODEL} for sample in theirs.values())
        health = httpx.get(served.url + "/health").json()
        assert (health["running"], health["kv_cache_usage"]) == (running, loads["kv_cache_usage_perc"])
        served.runner.running.set()
        for stream in streams:
            list(stream)


def test_attention_layers_are_reported_per_backend() -> None:
    """The start-up block and /health give the same counts in words."""
    layers = AttentionLayers(metal=24, portable=4, not_covered=("head_dim 512",))
    config = replace(fake_config(), attention_backend="metal", attention_layers=layers)
    with serve(config=config) as served:
        assert scrape(served)["attention_layers"] == {("metal",): 24, ("portable",): 4}
        assert "index_kernels" not in scrape(served)
        words = "metal; portable for 4 of 28 layers (head_dim 512)"
        assert httpx.get(served.url + "/health").json()["attention"] == words
    assert startup_rows(config, served.url, ("demo",))["attention"] == words


@pytest.mark.parametrize("why", ["", "the kernel fails"])
def test_an_index_without_kernels_shows(why: str) -> None:
    config = fake_config()
    layers = AttentionLayers(metal=4, no_index_kernels=why)
    config = replace(config, attention_layers=layers, model=replace(config.model, has_index=True))
    with serve(config=config) as served:
        assert scrape(served)["index_kernels"] == {(): int(not why)}


def test_command_buffer_limits_and_dispatch_are_reported() -> None:
    config = replace(fake_config(), command_buffers=CommandBufferLimits(29, 4096), dispatch="one after the other")
    with serve(config=config) as served:
        health = httpx.get(served.url + "/health").json()
    assert (told := health["command_buffers"]) == "up to 29 operations and 4,096 MB"
    rows = startup_rows(config, served.url, ("demo",))
    assert rows["commands"] == f"command buffers of {told}"
    assert rows["dispatch"] == health["dispatch"] == "one after the other"


def test_formats(served: Served) -> None:
    assert httpx.get(served.url + "/metrics").headers["content-type"].startswith("text/plain")
    response = httpx.get(served.url + "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_requests_are_counted() -> None:
    """Sends a prompt of 20 tokens with 5 output tokens, then the same prompt with cached blocks, then a cancelled
    request.
    """
    with serve(config=fake_config(block_size=8, max_num_batched_tokens=16), step_time=0.002) as served:
        prompt = byte_ids("x" * 20)
        for _ in range(2):
            served.client().completions.create(model=MODEL, prompt=prompt, max_tokens=5)
        with served.client().completions.create(
            model=MODEL, prompt=byte_ids("y" * 9), max_tokens=400, stream=True
        ) as stream:
            next(iter(stream))
        served.wait_until_idle()
        samples = scrape(served)
        cut = value(samples, "generation_tokens_total") - 10
        assert 1 <= cut < 400
        assert value(samples, "prompt_tokens_total") == 20 + 20 + 9
        assert value(samples, "prefix_cache_queries_total") == 20 + 20 + 9
        assert value(samples, "prefix_cache_hits_total") == 16
        ends = [value(samples, "request_success_total", r) for r in ("stop", "length", "abort", "error")]
        assert ends == [0, 2, 1, 0]
        # 16 + 4 rows of the first request, 4 of the second, 9 of the third. The first output token needs no further
        # row.
        assert value(samples, "step_rows_total", "fresh") == 16 + 4 + 9
        assert value(samples, "step_rows_total", "chunk") == 4
        # The step in flight when the client left may have computed one more row, whose token was discarded.
        assert value(samples, "step_rows_total", "decode") - (4 + 4 + cut - 1) in (0, 1)
        assert value(samples, "request_prompt_tokens_sum") == 40
        assert value(samples, "request_generation_tokens_sum") == 10
        assert value(samples, "time_to_first_token_seconds_count") == 3
        assert value(samples, "inter_token_latency_seconds_count") == 4 + 4 + cut - 1
        for name in ("e2e_request_latency", "request_decode_time", "request_inference_time"):
            assert value(samples, f"{name}_seconds_count") == 2
        parts = [value(samples, f"request_{part}_time_seconds_sum") for part in ("inference", "decode")]
        assert 0 < parts[1] < parts[0] < value(samples, "e2e_request_latency_seconds_sum")
        assert value(samples, "num_requests_running") == value(samples, "num_requests_waiting") == 0


def test_rejections_are_counted() -> None:
    with serve(args=ServerArgs(api_key="sesame", max_body_size=100)) as served:
        auth = {"authorization": "Bearer sesame"}
        for headers, path, body in [
            ({}, "/v1/completions", {"prompt": "a"}),
            (auth, "/v1/completions", {"prompt": 5}),
            (auth, "/v1/completions", {"prompt": "a" * 200}),
            (auth, "/v1/completions", {"prompt": "a", "model": "other"}),
            (auth, "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ]:
            httpx.post(served.url + path, json=body, headers=headers)
        samples = text_string_to_metric_families(httpx.get(served.url + "/metrics", headers=auth).text)
        (family,) = [f for f in samples if f.name == "metal_engine:requests_rejected"]
        counts = {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}
        once = dict.fromkeys(["unauthorized", "invalid", "too_large", "not_found"], 1.0)
        assert counts == {**once, "overloaded": 0.0, "shutting_down": 0.0}


def test_histogram_agrees_with_prometheus() -> None:
    bounds = (0.1, 0.5, 1.0)
    registry = CollectorRegistry()
    theirs = PrometheusHistogram("h", "h", buckets=bounds, registry=registry)
    ours = Histogram(bounds)
    for x in (0.0, 0.1, 0.100001, 0.5, 0.7, 1.0, 1.1, 50):
        theirs.observe(x)
        ours.add(x)
    total = 0
    for bound, count in zip(("0.1", "0.5", "1.0", "+Inf"), ours.counts, strict=True):
        total += count
        assert registry.get_sample_value("h_bucket", {"le": bound}) == total
    assert registry.get_sample_value("h_sum") == ours.sum


def test_the_dashboard_uses_only_existing_metrics(served: Served) -> None:
    text = dashboard.PAGE.read_text(encoding="utf-8")
    assert json.loads(text) == dashboard.dashboard(), "run `python -m tools.docs.dashboard`"
    names = set(re.findall(r"metal_engine:(\w+)", text))
    assert len(names) > 15 and names <= scrape(served).keys()


def test_a_request_id_is_kept_or_made(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "metal_engine")
    body = {"prompt": "a", "max_tokens": 2}
    url = served.url + "/v1/completions"
    response = httpx.post(url, json=body, headers={"x-request-id": "trace-1"})
    assert response.headers["x-request-id"] == "trace-1"
    made = [httpx.post(url, json=body, headers={"x-request-id": i}).headers["x-request-id"] for i in ("", "a b")]
    assert all(re.fullmatch("[0-9a-f]{32}", i) for i in made) and made[0] != made[1]
    wait_until(lambda: any("trace-1" in r.getMessage() for r in caplog.records), "the line")
    (record,) = [r for r in caplog.records if "trace-1" in r.getMessage()]
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["id"] == response.json()["id"] and fields["status"] == 200
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["finish_reason"]) == (1, 2, "length")


def test_json_logs() -> None:
    record = logging.LogRecord("metal_engine.x", logging.WARNING, "", 0, "a\n%s", ("ü",), None)
    record.fields = {"status": 200}
    token = current_request.set({"request_id": "r1"})
    try:
        RequestIdFilter().filter(record)
    finally:
        current_request.reset(token)
    text = JSONFormatter().format(record)
    line = json.loads(text)
    assert "\n" not in text and line["message"] == "a\nü"
    assert (line["request_id"], line["level"], line["status"]) == ("r1", "warning", 200)


def test_the_stats_line() -> None:
    with serve() as served:
        log = StatsLog(served.engine)
        assert log.line() is None
        served.client().completions.create(model=MODEL, prompt="a" * 20, max_tokens=10)
        served.wait_until_idle()
        line = log.line()
        assert line is not None and "running 0, waiting 0" in line and "prefix cache hits 0.0%" in line
        assert re.search(r"prompt \d+\.\d tokens/s, generation \d+\.\d tokens/s", line)
        assert log.line() is None
