"""Measures a chat of many turns with a hybrid model: time to first token of the last turn relative to the first.

    python -m tools.benchmarks.hybrid_chat

Compares metal-engine with mlx-lm. As with real clients, every turn sends the whole conversation again. The model has
Qwen 3.5's architecture, random weights and the demo model's tokenizer: its outputs are noise, but its costs are real.
Servers alternate by round and are restarted each time, so that nothing is cached at first. mlx-lm's server is installed
in its own environment and uses metal-engine's BLAS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tools.compare.peers import OURS, PEERS, install, running

MODEL: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "attention_bias": False,
}


def write_model(folder: Path) -> None:
    """Write a hybrid checkpoint with random weights and the demo model's tokenizer, which all servers can load."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from metal_engine.checkpoints.demo import fetch_demo_model
    from metal_engine.checkpoints.gguf.tokenizer import load_gguf_tokenizer
    from tools.fixtures.tiny_models import random_model

    tokenizer = load_gguf_tokenizer(fetch_demo_model())
    text = {**MODEL, "vocab_size": len(tokenizer)}
    config = {"model_type": "qwen3_5", "text_config": text, "vocab_size": len(tokenizer), "torch_dtype": "float32"}
    weights = dict(tree_flatten(random_model(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": tokenizer.eos_token_id}))


def turn(url: str, model: str, messages: list[dict[str, str]], max_tokens: int) -> tuple[float, int]:
    """Send a turn. Return the seconds to the first text (0.0 without text), and the number of prompt tokens."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started, first, num_tokens = time.perf_counter(), 0.0, 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            num_tokens = (event.get("usage") or {}).get("prompt_tokens", num_tokens)
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece:
                first = first or time.perf_counter() - started
    return first, num_tokens


def chat(name: str, folder: Path, args: argparse.Namespace) -> list[float]:
    """Start a server, send the turns of a conversation, and return the seconds to the first token of each turn."""
    words = "Here is one more paragraph of the text that we talk about, and it says something else each time. "
    messages: list[dict[str, str]] = []
    times = []
    with running(name, folder, same_blas=True) as server:
        turn(server.url, str(folder), [{"role": "user", "content": "warm up"}], 4)
        for number in range(args.turns):
            messages.append({"role": "user", "content": f"Turn {number}. " + words * args.paragraphs})
            seconds, num_tokens = turn(server.url, str(folder), messages, args.max_tokens)
            times.append(seconds)
            # A fixed text: a random model's output is tokenized differently in the next prompt.
            messages.append({"role": "assistant", "content": f"Answer {number}. {words}"})
            print(f"{name:12} turn {number + 1:2}: {num_tokens:5} tokens, {1000 * seconds:7.0f} ms", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--paragraphs", type=int, default=10, help="of a question")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    install(PEERS["mlx-lm"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        times: dict[str, list[list[float]]] = {OURS: [], "mlx-lm": []}
        for _ in range(args.rounds):
            for server in times:
                times[server].append(chat(server, folder, args))
    last = {}
    for server, rounds in times.items():
        first, last[server] = (statistics.median(turns[index] for turns in rounds) for index in (0, -1))
        print(f"{server:12} TTFT of turn 1: {1000 * first:.0f} ms, of turn {args.turns}: {1000 * last[server]:.0f} ms")
    print(f"TTFT of turn {args.turns}, ours / mlx-lm's = {last[OURS] / last['mlx-lm']:.2f}")


if __name__ == "__main__":
    main()
