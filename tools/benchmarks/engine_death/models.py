"""Kinds of models for the benchmark: their files, their names and the arguments of their servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metal_engine.checkpoints.demo import fetch_demo_model
from metal_engine.checkpoints.known_config import known_config
from metal_engine.checkpoints.tokenizer import load_tokenizer
from metal_engine.device.blas.load import load_optimized_blas
from metal_engine.settings.args import EngineArgs

_LORA_RANK = 8


@dataclass(frozen=True)
class BenchmarkModel:
    """Model that a server serves.

    Attributes:
        model: the server's MODEL.
        serve_args: additional arguments of the server.
        adapters: names of the LoRA adapters that the server loads.
    """

    model: str
    serve_args: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


def hybrid_model(folder: Path, demo: str) -> BenchmarkModel:
    """Write a tiny checkpoint with recurrent and attention layers, and with the demo model's tokenizer."""
    load_optimized_blas()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from tools.fixtures.architectures import configuration
    from tools.fixtures.tiny_models import random_model

    tokenizer = load_tokenizer(fetch_demo_model(), trust_remote_code=False)
    config = configuration("qwen3_5") | {"eos_token_id": tokenizer.eos_token_id}
    config["text_config"] |= {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    weights = dict(tree_flatten(random_model(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    return BenchmarkModel(str(folder))


def adapted_model(folder: Path, model: str) -> BenchmarkModel:
    """Write two LoRA adapters for q_proj and v_proj of a model whose configuration has the same keys as a Llama's."""
    load_optimized_blas()
    from tools.fixtures.lora_adapters import products_for, write_peft

    config = _config_of(model)
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    sizes = {"q_proj": num_heads * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    layers = [f"model.layers.{layer}.self_attn" for layer in range(config["num_hidden_layers"])]
    shapes = {f"{layer}.{name}": (hidden, size) for layer in layers for name, size in sizes.items()}
    names = ("adapter-a", "adapter-b")
    for seed, name in enumerate(names):
        write_peft(folder / name, products_for(shapes, _LORA_RANK, seed), alpha=_LORA_RANK / 2)
    modules = (part for name in names for part in ("--lora-modules", f"{name}={folder / name}"))
    return BenchmarkModel(model, tuple(modules), names)


def ranked_model(folder: Path, model: str) -> BenchmarkModel:
    """Return the model with the smallest number of ranks above 1 that divides the KV heads: 3 for the demo model."""
    num_kv_heads = _config_of(model)["num_key_value_heads"]
    num_ranks = next(size for size in range(2, num_kv_heads + 1) if num_kv_heads % size == 0)
    return BenchmarkModel(model, ("--tensor-parallel-size", str(num_ranks)))


def _config_of(model: str) -> dict[str, Any]:
    config = known_config(EngineArgs(model=model))
    assert config is not None
    return config


# Kind of model -> function that prepares the model. Its arguments are an empty folder and the argument of --model.
MODELS: dict[str, Callable[[Path, str], BenchmarkModel]] = {
    "attention": lambda folder, model: BenchmarkModel(model),
    "hybrid": hybrid_model,
    "quantized": lambda folder, model: BenchmarkModel(model, ("--kv-cache-dtype", "int8")),
    "lora": adapted_model,
    "ranks": ranked_model,
}
