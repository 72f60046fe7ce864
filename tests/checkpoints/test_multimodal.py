"""Checkpoints with vision or audio weights: text works from them. Weights count if the engine reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints import metadata
from metal_engine.checkpoints.image_encoders import image_refusal
from metal_engine.checkpoints.loader import load
from metal_engine.checkpoints.requirements import safetensors_requirements
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.args import EngineArgs
from tests.checkpoints.damage import CPU
from tests.support.checkpoint_files import VOCAB_SIZE, write_tokenizer, write_weights
from tools.fixtures.architectures import configuration
from tools.fixtures.tiny_models import random_model

METAL = replace(CPU, kind="metal")
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 12)


def as_stored(name: str) -> str:
    """Name a tensor as mlx-lm does."""
    return name


def nested(name: str) -> str:
    """Name a tensor as newer Hugging Face checkpoints do, with both towers below ``model``."""
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    return name.removeprefix("language_model.")


def beside(name: str) -> str:
    """Name a tensor as Qwen2-VL does, with the vision tower beside ``model``."""
    return name.removeprefix("language_model.")


# (model_type, names of the text model's tensors, first parts of the other tensors' names), as checkpoints on the hub
# have them.
CHECKPOINTS: list[tuple[str, Callable[[str], str], tuple[str, ...]]] = [
    ("qwen3_5", nested, ("model.visual",)),
    ("qwen3_5", as_stored, ("vision_tower",)),
    ("qwen3_5_moe", nested, ("model.visual",)),
    ("gemma3", as_stored, ("vision_tower", "multi_modal_projector")),
    ("gemma4", nested, ("model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio")),
    ("mistral3", as_stored, ("vision_tower", "multi_modal_projector")),
    ("mistral3", nested, ("model.vision_tower", "model.multi_modal_projector")),
    ("pixtral", as_stored, ("vision_tower", "multi_modal_projector")),
    ("kimi_vl", as_stored, ("vision_tower", "multi_modal_projector")),
    ("kimi_k25", as_stored, ("vision_tower", "mm_projector")),
    ("qwen3_vl", nested, ("model.visual",)),
    ("qwen3_vl", as_stored, ("vision_tower",)),
    ("qwen3_vl_moe", nested, ("model.visual",)),
    ("qwen3_vl_moe", as_stored, ("vision_tower",)),
    ("qwen2_vl", beside, ("visual",)),
    ("lfm2-vl", as_stored, ("vision_tower", "multi_modal_projector")),
]

# Models whose quantized checkpoints for MLX have vision weights, too.
QUANTIZED = ("qwen3_5", "gemma3", "gemma4", "mistral3", "kimi_vl", "qwen3_vl")


def write(
    folder: Path, model_type: str, rename: Callable[[str], str], others: tuple[str, ...], bits: int | None = None
) -> Any:
    """Write a checkpoint with vision weights, all of them quantized if ``bits`` is given. Return the text model."""
    config = configuration(model_type)
    config["text_config"] = {**config["text_config"], "vocab_size": VOCAB_SIZE}
    if "vocab_size_per_layer_input" in config["text_config"]:
        config["text_config"]["vocab_size_per_layer_input"] = VOCAB_SIZE
    config["vocab_size"] = VOCAB_SIZE
    if model_type == "gemma4":  # every published one shares the embedding with the LM head
        config["text_config"]["tie_word_embeddings"] = True
    model = random_model(config)
    if bits is not None:
        model, config = quantize_model(model, config, 32, bits)
    weights = {rename(name): array for name, array in tree_flatten(model.parameters())}
    for other in others:
        layer = nn.Linear(32, 48)
        arrays = layer if bits is None else layer.to_quantized(32, bits)
        weights |= {f"{other}.layers.0.proj.{name}": array for name, array in arrays.parameters().items()}
    write_weights(folder, weights, 1)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return model


@pytest.mark.parametrize(
    ("model_type", "rename", "others"), CHECKPOINTS, ids=[f"{name} {how.__name__}" for name, how, _ in CHECKPOINTS]
)
def test_text_works_from_a_multimodal_checkpoint(
    tmp_path: Path, model_type: str, rename: Callable[[str], str], others: tuple[str, ...]
) -> None:
    check(tmp_path, write(tmp_path, model_type, rename, others), tolerance=1e-5)


@pytest.mark.parametrize("model_type", QUANTIZED)
def test_text_works_from_a_quantized_multimodal_checkpoint(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, write(tmp_path, model_type, as_stored, ("vision_tower",), bits=4), tolerance=1e-4)


def check(folder: Path, original: Any, tolerance: float) -> None:
    """Load a checkpoint. Compare its logits, and the computed size of its weights, with the text model's."""
    loaded = load(EngineArgs(model=str(folder)), CPU)

    def logits(model: Any) -> np.ndarray:
        return np.array(model(mx.array(TOKENS)[None], cache=make_prompt_cache(model))[0])

    expected = logits(original)
    assert np.abs(logits(loaded.model) - expected).max() < tolerance * np.abs(expected).max()
    check_paged_model(PagedModel(loaded.model), PortableBackend(), VOCAB_SIZE)
    num_bytes = sum(array.nbytes for _, array in tree_flatten(original.parameters()))
    tensors = list(metadata.stored_tensors(metadata.weight_files(folder)))
    config = metadata.read_config(folder)
    facts = safetensors_requirements(config, tensors, EngineArgs(model=str(folder)), METAL)
    if image_refusal(config, EngineArgs(model=str(folder))) is None:
        num_bytes += sum(tensor.nbytes for tensor in metadata.vision_tensors(tensors))
    # On Metal, the weights keep their type, so reading them takes no further memory.
    assert (facts.weight_bytes, facts.reading_bytes) == (num_bytes, 0)
