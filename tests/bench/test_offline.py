"""Tests `metal-engine bench throughput` and `latency` on small models: counts match the settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metal_engine.bench.args import BenchLatencyArgs, BenchThroughputArgs
from metal_engine.bench.offline import bench_latency, bench_throughput
from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from tests.support.checkpoint_files import write_checkpoint, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
# An engine runs its largest step at its start, and clears its KV cache. The default sizes take seconds on a CPU.
SMALL = [
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "4"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "64"),
]


def bench(tmp_path: Path, *command: str) -> dict[str, Any]:
    saved = tmp_path / "result.json"
    full = [sys.executable, "-m", "metal_engine", "bench", *command, "--save-result", str(saved)]
    done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(saved.read_text())
    assert "peak memory mib" in done.stdout and f" {result['kv_cache_dtype']}\n" in done.stdout
    return result


def test_throughput(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", config={"hidden_size": 256, "intermediate_size": 4096})
    write_tokenizer(model)
    sizes = ["--num-prompts", "3", "--input-len", "12", "--output-len", "4"]
    result = bench(tmp_path, "throughput", str(model), *sizes, *SMALL)
    assert (result["requests"], result["input_tokens"], result["output_tokens"]) == (3, 36, 12)
    assert result["steps"] == 4, "one step for all prompts, and no step of the warm-up"
    assert result["output_tokens_per_second"] == 12 / result["seconds"]
    assert result["peak_memory_mib"] > (model / "model.safetensors").stat().st_size / (1 << 20) > 20
    assert result["kv_cache_dtype"] == "float32"


def test_requests_that_do_not_fit(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    write_tokenizer(model)
    engine = EngineArgs(model=str(model), max_model_len=64, max_num_batched_tokens=64, num_gpu_blocks_override=8)
    with pytest.raises(ConfigError, match="the maximum context length is 64"):
        bench_throughput(engine, BenchThroughputArgs(num_prompts=2, input_len=60, output_len=5))
    with pytest.raises(ConfigError, match="the maximum context length is 64"):
        bench_latency(engine, BenchLatencyArgs(batch_size=2, input_len=64))


def test_latency_and_quantized_kv(tmp_path: Path) -> None:
    """The engine uses the requested type. A large pool takes 40 bytes for 64 numbers instead of 256."""
    model = str(write_checkpoint(tmp_path / "model", config={"head_dim": 64}))
    sizes = ["--batch-size", "2", "--input-len", "8", "--output-len", "3", "--num-iters", "3"]
    sizes += ["--num-iters-warmup", "1", *SMALL, "--num-gpu-blocks-override", "2048"]
    results = [
        bench(tmp_path, "latency", model, *sizes, "--kv-cache-dtype", kv_cache_dtype)
        for kv_cache_dtype in ("auto", "int4")
    ]
    assert [result["kv_cache_dtype"] for result in results] == ["float32", "int4"]
    for result in results:
        assert (result["iterations"], result["batch_size"]) == (3, 2)
        assert 0 < result["p10_seconds"] <= result["p50_seconds"] <= result["p99_seconds"]
    peaks = [result["peak_memory_mib"] for result in results]
    pool_mib = 2048 * 16 * 2 * 2 * 2 * 256 / (1 << 20)  # 2 layers, K and V, 2 heads
    assert peaks[0] > pool_mib and peaks[0] - peaks[1] > 0.8 * (1 - 40 / 256) * pool_mib
