"""Measures the cost of dividing a model between ranks on one machine: messages on the side channel, and step times.

Writes a model of random weights with 8 heads, 4 KV heads and about the demo model's size. Then it times steps of one
process and of two ranks in rotation. Ranks on one machine share its cores, so two ranks are not faster. The ratio shows
the cost of the exchange, not the gain of a second machine.

    python -m tools.benchmarks.distributed [--rounds 3] [--requests 16] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 32
_SIZES = {"hidden_size": 512, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
_SMOKE = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 49152}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="one round with a tiny model, to check that the tool runs")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "RANKS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure[0], int(args.measure[1]), args.requests, args.steps)))
        return
    messages(args.requests)
    messages(64)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", _WRITE, folder, json.dumps(_SMOKE if args.smoke else _SIZES)], check=True)
        compare(folder, 1 if args.smoke else args.rounds, args.requests, 4 if args.smoke else args.steps)


def messages(num_requests: int) -> None:
    """Print the size of a decode step's plan on the side channel, and the times to encode and to decode the plan."""
    from metal_engine.distributed.channel import HEADER_BYTES
    from metal_engine.distributed.wire import decode_plan, encode_ids, encode_plan
    from metal_engine.step import SchedulerOutput

    ids = [f"chatcmpl-{i:032x}#{i}" for i in range(num_requests)]
    # Every request gets a block in every 16th step.
    blocks = {ids[i]: [1000 + i] for i in range(0, num_requests, 16)}
    plan = SchedulerOutput(1000, dict.fromkeys(ids, 1), new_block_ids=blocks, sampled_req_ids=ids)
    content = encode_plan(plan)
    write, read = _microseconds(lambda: encode_plan(plan)), _microseconds(lambda: decode_plan(content))
    num_bytes = len(content) + len(encode_ids([])) + 2 * HEADER_BYTES  # includes the frame that ends the step
    print(f"{num_requests} decodes: {num_bytes} bytes, written in {write:.0f} us, read in {read:.0f} us")


def _microseconds(call: Any) -> float:
    times = []
    for _ in range(200):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


# In a separate process, so that MLX's memory belongs only to the measured processes.
_WRITE = """
import sys, json
from tools.benchmarks.distributed import write_model
write_model(sys.argv[1], json.loads(sys.argv[2]))
"""


def write_model(folder: str, sizes: dict[str, int]) -> None:
    """Write a Llama of random weights with the demo model's tokenizer."""
    from metal_engine.device.blas.load import load_optimized_blas

    load_optimized_blas()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from metal_engine.checkpoints.demo import fetch_demo_model
    from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer
    from tools.fixtures.tiny_models import TINY_LLAMA, random_model

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "eos_token_id": 2}
    config = TINY_LLAMA | heads | sizes
    load_gguf_tokenizer(fetch_demo_model()).save_pretrained(folder)
    weights: Any = dict(tree_flatten(random_model(config).parameters()))
    mx.save_safetensors(str(Path(folder) / "model.safetensors"), weights)
    (Path(folder) / "config.json").write_text(json.dumps(config))


def measure(model: str, num_ranks: int, num_requests: int, num_steps: int) -> dict[str, float]:
    """Run requests on a model with ``num_ranks`` ranks.

    Returns:
        ``prompts``: seconds of all steps with prompts. ``decode``: median seconds of a decode step. ``weights`` and
        ``peak``: MiB of the weights, and peak of MLX's memory in this process (rank 0).
    """
    from metal_engine.loading.build import build_engine
    from metal_engine.sampling_params import SamplingParams
    from metal_engine.settings.args import EngineArgs

    sizes: dict[str, Any] = {"max_num_seqs": num_requests, "kv_cache_memory_bytes": 1 << 28}
    engine = build_engine(EngineArgs(model=model, tensor_parallel_size=num_ranks, **sizes))
    core = engine.core
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    try:
        for i in range(num_requests):
            core.add_request(str(i), engine.preparer.prepare([5 + i] * PROMPT_TOKENS, params))
        times = []
        while core.has_requests:
            start = time.perf_counter()
            core.step()
            times.append(time.perf_counter() - start)
        import mlx.core as mx

        return {
            "prompts": sum(times[: len(times) - num_steps + 1]),
            "decode": statistics.median(times[len(times) - num_steps + 1 :]),
            "weights": core.config.weight_bytes / (1 << 20),
            "peak": mx.get_peak_memory() / (1 << 20),
        }
    finally:
        engine.close()


def compare(folder: str, rounds: int, num_requests: int, num_steps: int) -> None:
    """Run one process and two ranks in rotation. Print the medians of the runs, and their ratios."""
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for num_ranks, runs in found.items():
            sizes = ["--requests", str(num_requests), "--steps", str(num_steps)]
            command = [
                sys.executable,
                "-m",
                "tools.benchmarks.distributed",
                "--measure",
                folder,
                str(num_ranks),
                *sizes,
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    one, two = ({name: statistics.median(run[name] for run in runs) for name in runs[0]} for runs in found.values())
    print(f"{num_requests} requests, medians of {rounds} runs:")
    for name, unit, scale in (("prompts", "ms", 1e3), ("decode", "ms", 1e3), ("weights", "MiB", 1), ("peak", "MiB", 1)):
        values = f"{one[name] * scale:9.1f} {unit} {two[name] * scale:9.1f} {unit}"
        print(f"  {name:8} 1 process, 2 ranks: {values}   ratio {two[name] / one[name]:.2f}")


if __name__ == "__main__":
    main()
