"""LoRA adapters with random weights in the formats of PEFT and mlx-lm, engines with adapters, and mlx-lm's outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import load_adapters

from metal_engine.lora.layers import shape_of
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.models.lora_targets import adapter_targets
from metal_engine.models.paged_model import PagedModel
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.lora_adapters import Products, products_for
from tools.fixtures.stepped_engine import SteppedEngine

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
ALL = (*ATTENTION, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def products(model: nn.Module, keys: Sequence[str], rank: int, seed: int, layers: Sequence[int] = (0, 1)) -> Products:
    """Return random LoRA factors for the modules ``keys`` of the layers ``layers``, by the names of the modules."""
    modules = dict(model.named_modules())
    names = [f"model.layers.{layer}.{key}" for layer in layers for key in keys]
    return products_for({name: shape_of(modules[name]) for name in names}, rank, seed)


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


def adapted_engine(
    folders: dict[str, Path], *, max_loras: int | None = None, max_rank: int = 8, **config: Any
) -> SteppedEngine:
    """Return a :func:`tiny_engine` with adapters. ``config`` is passed on."""

    def make(paged: PagedModel) -> AdapterRegistry:
        targets = adapter_targets(paged)
        slots = max_loras or len(folders)
        layers = paged.enable_lora(targets.shapes, slots, max_rank)
        return AdapterRegistry(targets, slots, max_rank, layers.set_weights)

    engine = tiny_engine(make_adapters=make, **config)
    for name, folder in folders.items():
        load(engine, name, folder)
    return engine


def load(engine: SteppedEngine, name: str, folder: Path, **options: Any) -> None:
    engine.adapters.load(name, str(folder), lambda function: function(), **options)


def mlx_lms(model: nn.Module, folder: Path | None) -> nn.Module:
    """Load an adapter into ``model`` with mlx-lm's own loader. Return the model, unchanged if ``folder`` is None."""
    if folder is not None:
        load_adapters(model, str(folder))
        model.eval()
        mx.eval(model.parameters())
    return model


def mlx_lm_answer(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of mlx-lm's own generation."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=num_tokens)]
