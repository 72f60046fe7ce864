"""LoRA adapters with random weights in the formats of PEFT and mlx-lm, engines with adapters, and mlx-lm's outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import load_adapters

from metal_engine.lora.layers import shape_of
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.models.lora_targets import adapter_targets
from metal_engine.models.paged_model import PagedModel
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.stepped_engine import SteppedEngine

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
ALL = (*ATTENTION, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

Products = dict[str, tuple[np.ndarray, np.ndarray]]  # by module: a [inputs, rank], b [rank, outputs]


def products(model: nn.Module, keys: Sequence[str], rank: int, seed: int, layers: Sequence[int] = (0, 1)) -> Products:
    """Return random LoRA factors for some modules of some layers."""
    modules = dict(model.named_modules())
    names = [f"model.layers.{layer}.{key}" for layer in layers for key in keys]
    return products_for({name: shape_of(modules[name]) for name in names}, rank, seed)


def products_for(shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Products:
    """Return random LoRA factors that change logits by about as much as the layers themselves do."""
    rng = np.random.default_rng(seed)

    def random(inputs: int, outputs: int) -> np.ndarray:
        return rng.normal(0, 0.5 / np.sqrt(inputs), (inputs, outputs)).astype(np.float32)

    return {name: (random(inputs, rank), random(rank, outputs)) for name, (inputs, outputs) in shapes.items()}


def write_mlx_lm(folder: Path, made: Products, scale: float = 2.0, **config: Any) -> Path:
    """Write an adapter for all layers in mlx-lm's format."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(made.values()))[0].shape[1]
    keys = sorted({re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in made})
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    settings = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    arrays = {f"{name}.lora_{part}": mx.array(one) for name, ab in made.items() for part, one in zip("ab", ab)}  # noqa: B905
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    return folder


def write_peft(folder: Path, made: Products, alpha: float = 16.0, dtype: mx.Dtype = mx.float32, **config: Any) -> Path:
    """Write an adapter in PEFT's format."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(made.values()))[0].shape[1]
    targets = sorted({name.rpartition(".")[2] for name in made})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    arrays = {}
    for name, ab in made.items():
        for part, one in zip("AB", ab, strict=True):
            arrays[f"base_model.model.{name}.lora_{part}.weight"] = mx.array(np.ascontiguousarray(one.T)).astype(dtype)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), arrays)
    return folder


def adapted_engine(
    folders: dict[str, Path], *, max_loras: int | None = None, max_rank: int = 8, **config: Any
) -> SteppedEngine:
    """Return a :func:`tiny_engine` with adapters. ``config`` is passed on."""

    def make(paged: PagedModel) -> AdapterRegistry:
        targets = adapter_targets(paged)
        slots = max_loras or len(folders)
        layers = paged.adapt(targets.shapes, slots, max_rank)
        return AdapterRegistry(targets, slots, max_rank, layers.set_weights)

    engine = tiny_engine(make_adapters=make, **config)
    for name, folder in folders.items():
        load(engine, name, folder)
    return engine


def load(engine: SteppedEngine, name: str, folder: Path, **options: Any) -> None:
    assert engine.adapters is not None
    engine.adapters.load(name, str(folder), lambda function: function(), **options)


def mlx_lms(model: nn.Module, folder: Path | None) -> nn.Module:
    """Load an adapter into a model with mlx-lm's own loader. Changes the model."""
    if folder is not None:
        load_adapters(model, str(folder))
        model.eval()
        mx.eval(model.parameters())
    return model


def mlx_lm_answer(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of mlx-lm's own generation."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens)]
