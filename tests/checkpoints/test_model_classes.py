"""Text models of multimodal checkpoints whose architecture mlx-lm lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal_engine.checkpoints.loader import load
from metal_engine.checkpoints.model_classes import model_classes
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.args import EngineArgs
from tests.checkpoints.damage import CPU
from tests.support.checkpoint_files import VOCAB_SIZE, write_tokenizer, write_weights
from tools.fixtures.tiny_models import TINY_LLAMA, random_model

TEXT = TINY_LLAMA | {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": False}
IDS = mx.array(np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, 12)))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1),
        lambda name: name.replace("model.", "model.text_model.", 1),
        lambda name: "language_model." + name.removeprefix("model."),
    ],
    ids=["nested", "newer", "SmolVLM", "SmolVLM in mlx-vlm"],
)
def test_weights_by_each_name(rename: Callable[[str], str], tmp_path: Path) -> None:
    """The tower's weights are left out."""
    model = random_model(TEXT)
    weights = {rename(name): array for name, array in tree_flatten(model.parameters())}
    weights["model.vision_model.encoder.weight"] = weights["some_tower.weight"] = mx.zeros((4, 4))
    write_weights(tmp_path, weights, 1)
    config = {"model_type": "seen_for_the_first_time", "text_config": TEXT, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    loaded: Any = load(EngineArgs(model=str(tmp_path)), CPU).model
    assert np.array_equal(np.array(loaded(IDS)), np.array(model(IDS)))
    assert PagedModel(loaded).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("model_type", ["smolvlm", "llava"])
def test_fields_that_published_configurations_omit(model_type: str) -> None:
    config = {"model_type": model_type, "text_config": {k: v for k, v in TEXT.items() if k != "rms_norm_eps"}}
    model_class, args_class = model_classes(config)
    args = args_class.from_dict(config)
    assert args.text_config == TEXT | {"rms_norm_eps": 1e-6}
    assert model_class(args).language_model.args.rms_norm_eps == 1e-6


def test_transformers_makes_no_list_of_all_layers() -> None:
    text = {"model_type": "qwen3", "hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 1 << 40}
    model_classes({"model_type": "internvl", "text_config": text})
    assert (text["head_dim"], text["num_key_value_heads"], text["num_hidden_layers"]) == (128, 32, 1 << 40)


def test_values_that_transformers_refuses() -> None:
    text = {"model_type": "llama", "hidden_size": "wide"}
    model_classes({"model_type": "smolvlm", "text_config": text})
    assert text == {"model_type": "llama", "hidden_size": "wide"}


@pytest.mark.parametrize("text", [None, {}, {"model_type": "nonesuch"}, {"model_type": 3}])
def test_a_config_without_a_known_text_model_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="nonesuch"):
        model_classes({"model_type": "nonesuch", "text_config": text})


def test_architectures_of_mlx_lm_keep_their_classes() -> None:
    model_class, _ = model_classes({"model_type": "mistral3", "text_config": TEXT})
    assert model_class.__module__ == "mlx_lm.models.mistral3"
