"""Checkpoints with vision or audio weights: text works from them, and only the text model's weights count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints import checkpoint
from metal_engine.checkpoints.loader import load
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo
from tests.support.checkpoint_files import VOCAB_SIZE, write_tokenizer, write_weights
from tools.fixtures.architectures import configuration
from tools.fixtures.tiny_models import random_model

CPU = DeviceInfo(kind="cpu", name="test", compute="test", memory_bytes=1 << 30)
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
    ("qwen2_vl", beside, ("visual",)),
    ("lfm2-vl", as_stored, ("vision_tower", "multi_modal_projector")),
]


def write(folder: Path, model_type: str, rename: Callable[[str], str], others: tuple[str, ...]) -> Any:
    """Write a checkpoint with vision weights. Return the mlx-lm model of its text."""
    config = configuration(model_type)
    config["text_config"] = {**config["text_config"], "vocab_size": VOCAB_SIZE}
    if "vocab_size_per_layer_input" in config["text_config"]:
        config["text_config"]["vocab_size_per_layer_input"] = VOCAB_SIZE
    config["vocab_size"] = VOCAB_SIZE
    if model_type == "gemma4":  # every published one shares the embedding with the LM head
        config["text_config"]["tie_word_embeddings"] = True
    model = random_model(config)
    weights = {rename(name): array for name, array in tree_flatten(model.parameters())}
    for other in others:
        weights[f"{other}.layers.0.proj.weight"] = mx.random.normal((48, 32))
        weights[f"{other}.layers.0.proj.bias"] = mx.random.normal((48,))
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
    original = write(tmp_path, model_type, rename, others)
    loaded = load(EngineArgs(model=str(tmp_path)), CPU)

    def logits(model: Any) -> np.ndarray:
        return np.array(model(mx.array(TOKENS)[None], cache=make_prompt_cache(model))[0])

    expected = logits(original)
    assert np.abs(logits(loaded.model) - expected).max() < 1e-5 * np.abs(expected).max()
    check_paged_model(PagedModel(loaded.model), PortableBackend(), VOCAB_SIZE)
    taken = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    tensors = checkpoint.stored_tensors(checkpoint.weight_files(tmp_path))
    assert checkpoint.weight_bytes(tensors, checkpoint.read_config(tmp_path), None) == taken
