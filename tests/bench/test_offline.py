"""`metal-engine bench throughput` and `latency` on the demo model: what they count is what was asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# An engine tries its largest step when it starts, and clears its KV cache: seconds for the default sizes on a CPU.
SMALL = [
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "4"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "64"),
]


def bench(tmp_path: Path, *command: str) -> dict[str, float]:
    saved = tmp_path / "result.json"
    full = [sys.executable, "-m", "metal_engine", "bench", *command, "--save-result", str(saved)]
    done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "peak memory mib" in done.stdout
    return dict(json.loads(saved.read_text()))


def test_throughput(demo_path: Path, tmp_path: Path) -> None:
    sizes = ["--num-prompts", "3", "--input-len", "12", "--output-len", "4"]
    result = bench(tmp_path, "throughput", str(demo_path), *sizes, *SMALL)
    assert (result["requests"], result["input_tokens"], result["output_tokens"]) == (3, 36, 12)
    assert result["output_tokens_per_second"] == 12 / result["seconds"]
    assert result["peak_memory_mib"] > 500  # the weights alone


def test_latency(demo_path: Path, tmp_path: Path) -> None:
    sizes = ["--batch-size", "2", "--input-len", "8", "--output-len", "3", "--num-iters", "3"]
    result = bench(tmp_path, "latency", str(demo_path), *sizes, "--num-iters-warmup", "1", *SMALL)
    assert (result["iterations"], result["batch_size"]) == (3, 2)
    assert 0 < result["p10_seconds"] <= result["p50_seconds"] <= result["p99_seconds"]
