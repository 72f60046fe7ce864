"""Tests the benchmark's statistics against NumPy, and its arrivals against the moments of the distribution."""

from __future__ import annotations

import json
import math
from math import inf

import numpy as np
import pytest

from metal_engine.bench.args import BenchServeArgs
from metal_engine.bench.client import RequestRecord
from metal_engine.bench.datasets import arrival_times
from metal_engine.bench.report import table
from metal_engine.bench.server_metrics import SpecDecodeCounts, parse_counts, parse_kv_cache_dtype
from metal_engine.bench.stats import peak_concurrency, summarize
from metal_engine.errors import ConfigError
from metal_engine.settings.fields import flag


def record(started: float, times: list[float], *, output_len: int | None = None) -> RequestRecord:
    return RequestRecord(
        started=started,
        ended=times[-1],
        token_times=times,
        prompt_len=10,
        output_len=output_len or len(times),
        finish_reason="length",
    )


@pytest.fixture
def records() -> list[RequestRecord]:
    rng = np.random.default_rng(3)
    starts = np.cumsum(rng.exponential(0.2, 40))
    return [record(s, (s + np.cumsum(rng.gamma(2.0, 0.1, rng.integers(1, 30)))).tolist()) for s in starts]


def test_figures_are_numpys(records: list[RequestRecord]) -> None:
    summary = summarize(records, percentiles=(50.0, 99.0))
    starts = np.array([r.started for r in records])
    times = [np.array(r.token_times) for r in records]
    duration = max(t[-1] for t in times) - starts.min()
    num_tokens = sum(map(len, times))
    assert summary.duration == pytest.approx(duration)
    assert summary.output_throughput == pytest.approx(num_tokens / duration)
    assert summary.total_throughput == pytest.approx((num_tokens + 400) / duration)
    assert summary.request_throughput == pytest.approx(40 / duration)
    expected = {
        "ttft": np.array([t[0] for t in times]) - starts,
        "e2el": np.array([t[-1] for t in times]) - starts,
        "itl": np.concatenate([np.diff(t) for t in times]),
        "tpot": np.array([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]),
    }
    result = summary.to_json()
    for name, seconds in expected.items():
        milliseconds = seconds * 1e3
        assert result[f"mean_{name}_ms"] == pytest.approx(milliseconds.mean())
        assert result[f"median_{name}_ms"] == pytest.approx(np.median(milliseconds))
        assert result[f"p50_{name}_ms"] == pytest.approx(np.median(milliseconds))
        assert result[f"std_{name}_ms"] == pytest.approx(milliseconds.std())
        assert result[f"p99_{name}_ms"] == pytest.approx(np.percentile(milliseconds, 99))


def test_tokens_are_counted_from_usage_not_from_pieces() -> None:
    summary = summarize([record(0.0, [1.0, 3.0], output_len=5)])
    assert summary.output_tokens == 5
    assert summary.tpot.mean == pytest.approx(500.0)  # 2 s for four tokens after the first
    assert summary.itl.mean == pytest.approx(2000.0)


def test_failed_requests_affect_only_the_failure_count() -> None:
    failed = RequestRecord(started=1.0, ended=9.0, prompt_len=99, output_len=99, error="status 500")
    summary = summarize([record(0.0, [1.0, 2.0]), failed])
    assert (summary.num_ok, summary.num_failed, summary.input_tokens, summary.output_tokens) == (1, 1, 10, 2)
    assert summary.duration == pytest.approx(2.0)


def test_summary_of_only_failed_requests_is_valid_json() -> None:
    summary = summarize([RequestRecord(error="refused")])
    assert math.isnan(summary.ttft.mean) and summary.output_throughput == 0.0
    json.dumps(summary.to_json(), allow_nan=False)
    assert "Failed requests:" in table(summary)


def test_goodput() -> None:
    # TTFT 100, 300, 100 ms; TPOT 100, 100, 400 ms.
    runs = [record(0, [0.1, 0.2]), record(0, [0.3, 0.4]), record(0, [0.1, 0.5])]
    assert summarize(runs, goodput={"ttft": 200.0}).goodput == pytest.approx(2 / 0.5)
    assert summarize(runs, goodput={"ttft": 200.0, "tpot": 200.0}).goodput == pytest.approx(1 / 0.5)
    assert summarize(runs, goodput={"e2el": 450.0}).goodput == pytest.approx(2 / 0.5)
    assert summarize(runs).goodput is None


def test_peak_concurrency() -> None:
    assert peak_concurrency([record(0, [2.0]), record(1, [3.0]), record(2, [4.0]), record(5, [6.0])]) == 2
    assert peak_concurrency([]) == 0


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals(burstiness: float) -> None:
    times = arrival_times(50_000, 8.0, burstiness, seed=0)
    gaps = np.diff(times)
    assert times[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
    # In a gamma distribution of shape k, the standard deviation divided by the mean is k ** -0.5.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)
    assert (arrival_times(50_000, 8.0, burstiness, seed=0) == times).all()


def test_all_at_once() -> None:
    assert (arrival_times(5, math.inf, 1.0, seed=0) == 0).all()


@pytest.mark.parametrize(("settings", "message"), [
    ({"goodput": ("ttfb:5",)}, "--goodput must be"),
    ({"goodput": ("ttft",)}, "--goodput must be"),
    ({"goodput": ("ttft:nan",)}, "--goodput must be"),
    ({"goodput": ("tpot:0",)}, "--goodput must be"),
    ({"percentiles": ("101",)}, "--percentiles"),
    ({"percentiles": ("high",)}, "--percentiles"),
    ({"request_rate": 0.0}, "--request-rate"),
    ({"burstiness": -1.0}, "--burstiness"),
    ({"num_prompts": 0}, "--num-prompts"),
    ({"max_concurrency": 0}, "--max-concurrency"),
    ({"dataset_name": "custom"}, "--dataset-path"),
    ({"dataset_path": "x.jsonl"}, "--dataset-path"),
    ({"dataset_name": "prefix"}, "--prefix-len"),
    ({"base_url": "localhost:8000"}, "--base-url"),
    ({"range_ratio": 1.0}, "--range-ratio"),
    *[({name: inf}, flag(name)) for name in ("burstiness", "temperature", "request_timeout", "ready_timeout")],
])  # fmt: skip
def test_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchServeArgs(**settings)


def test_draft_counts_are_summed_over_all_metric_labels() -> None:
    text = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 4.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 6.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
"""
    counts = parse_counts(text)
    assert counts == SpecDecodeCounts(10, 30, 15)
    assert counts.acceptance_rate == 50.0 and counts.acceptance_length == 2.5
    assert counts.since(SpecDecodeCounts(1, 10, 15)) == SpecDecodeCounts(9, 20, 0) and counts.since(None) == counts
    assert SpecDecodeCounts().acceptance_rate == 0.0 and SpecDecodeCounts().acceptance_length == 1.0
    assert parse_counts("vllm:num_requests_running 3.0\n") is None


def test_the_type_of_a_servers_kv_is_that_of_the_model() -> None:
    one = 'metal_engine:engine_info{device="cpu",kv_cache_dtype="int8",model_name="a \\"b\\", {c}"} 1.0\n'
    other = 'metal_engine:engine_info{kv_cache_dtype="bfloat16",model_name="d"} 1.0\n'
    assert parse_kv_cache_dtype(one, "another name of it") == "int8"
    assert parse_kv_cache_dtype(one + other, "d") == "bfloat16"
    assert parse_kv_cache_dtype(one + other, "e") is None
    assert parse_kv_cache_dtype("vllm:num_requests_running 3.0\n", "d") is None
