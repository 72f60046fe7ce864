"""Tests of reading draft heads, named as in published checkpoints, in conversions and in sidecars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal_engine.checkpoints.draft_heads import read_head
from metal_engine.errors import ModelLoadError
from metal_engine.models.draft_head import DraftHead, load_head
from tests.support.draft_heads import random_head
from tests.support.tiny_engine import tiny_reference

Weights = dict[str, mx.array]
MODEL_TENSOR = {"model.language_model.embed_tokens.weight": mx.zeros((4, 4))}


def flat(head: DraftHead) -> Weights:
    found: Any = tree_flatten(head.parameters())
    return dict(found)


def write(folder: Path, weights: Weights, config: dict[str, Any] | None = None, name: str = "model") -> Path:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / f"{name}.safetensors"), weights)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def shifted(weights: Weights) -> Weights:
    """Return weights as Qwen publishes them: norms multiply by 1 + weight."""
    return {name: array - 1.0 if "norm" in name else array for name, array in weights.items()}


def with_prefix(weights: Weights) -> Weights:
    return {f"mtp.{name}": array for name, array in weights.items()}


def with_single_experts(weights: Weights) -> Weights:
    found = {}
    for name, array in weights.items():
        if "switch_mlp" in name:
            found |= {name.replace("switch_mlp", f"experts.{i}"): expert for i, expert in enumerate(array)}
        else:
            found[name] = array
    return found


def check(place: Path, model: nn.Module, expected: Weights, atol: float = 1e-6) -> None:
    head = load_head(model, read_head(place, model), mx.float32, dequantize=True)
    found = flat(head)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(np.array(found[name]), np.array(array), atol=atol, err_msg=name)


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return tiny_reference(architecture="qwen3_5")


@pytest.fixture(scope="module")
def dense_head(dense: nn.Module) -> Weights:
    return flat(random_head(dense))


def test_a_published_checkpoint(dense: nn.Module, dense_head: Weights, tmp_path: Path) -> None:
    """Its norms are shifted, which the convolutions of its recurrent layers tell."""
    raw = {"model.language_model.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 1, 4))}
    check(write(tmp_path, with_prefix(shifted(dense_head)) | raw | MODEL_TENSOR), dense, dense_head)


@pytest.mark.parametrize("norms", ["shifted", "unshifted"])
def test_the_config_of_a_sidecar_says_whether_norms_are_shifted(
    dense: nn.Module, dense_head: Weights, norms: str, tmp_path: Path
) -> None:
    weights = shifted(dense_head) if norms == "shifted" else dense_head
    check(write(tmp_path, with_prefix(weights), {"norms": norms}, "mtp"), dense, dense_head)


def test_norms_of_which_nothing_is_known_are_refused(dense: nn.Module, dense_head: Weights, tmp_path: Path) -> None:
    converted = {"language_model.model.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 4, 1))}
    for weights in (dense_head, with_prefix(dense_head) | converted):
        with pytest.raises(ModelLoadError, match=r'set "norms" to "shifted"'):
            read_head(write(tmp_path, weights), dense)
    with pytest.raises(ModelLoadError, match="norms must be shifted or unshifted, not 1"):
        read_head(write(tmp_path, dense_head, {"norms": 1}), dense)


def test_the_config_decides_about_the_norms_beside_any_experts(tmp_path: Path) -> None:
    """mlx-lm shifts Qwen3-Next's norms if experts are not stacked. Some tools stack experts and do not shift norms."""
    model = tiny_reference(architecture="qwen3_next")
    head = flat(random_head(model))
    for i, experts in enumerate((with_single_experts, dict)):
        place = tmp_path / str(i)
        check(write(place, experts(shifted(head)), {"norms": "shifted"}), model, head)
        check(write(place, experts(head), {"norms": "unshifted"}), model, head)
    (place / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r'set "norms" to "shifted"'):
        read_head(place, model)


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_moe"])
def test_single_experts_are_stacked(architecture: str, tmp_path: Path) -> None:
    model = tiny_reference(architecture=architecture)
    head = flat(random_head(model))
    assert any("switch_mlp" in name for name in head)
    raw = {"model.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 1, 4))}
    check(write(tmp_path, with_prefix(with_single_experts(shifted(head))) | raw), model, head)


@pytest.mark.parametrize("place", ["mtp.safetensors", "mtp/head.safetensors", "head.safetensors"])
@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_places_of_a_sidecar(place: str, prefix: str, tmp_path: Path) -> None:
    """The norms of Llama are never shifted."""
    model = tiny_reference()
    head = flat(random_head(model))
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(path), {prefix + name: array for name, array in head.items()})
    check(tmp_path, model, head)
    check(path, model, head)


def test_a_quantized_head(tmp_path: Path) -> None:
    """Bits and group sizes are those of the stored arrays, module by module."""
    model = tiny_reference()
    head = random_head(model)
    expected = flat(head)
    bits = {"fc": 8, "layers.0.mlp.down_proj": 4}

    def quantization(path: str, module: nn.Module) -> dict[str, int] | bool:
        return {"group_size": 32, "bits": bits[path]} if path in bits else False

    nn.quantize(head, class_predicate=quantization)
    weights = read_head(write(tmp_path, with_prefix(flat(head))), model)
    check(tmp_path, model, expected, atol=0.2)
    kept = load_head(model, weights, mx.float32, dequantize=False)
    assert isinstance(kept.fc, nn.QuantizedLinear) and kept.fc.bits == 8
    assert isinstance(kept.layers[0].mlp.down_proj, nn.QuantizedLinear) and kept.layers[0].mlp.down_proj.bits == 4
    assert isinstance(kept.layers[0].mlp.up_proj, nn.Linear)


def test_refusals(tmp_path: Path) -> None:
    model = tiny_reference()
    head = flat(random_head(model))
    with pytest.raises(ModelLoadError, match="none has no weights of a draft head: set `model`"):
        read_head(write(tmp_path / "none", MODEL_TENSOR), model)
    with pytest.raises(ModelLoadError, match="has no weights of a draft head"):
        read_head(tmp_path, model)
    two = with_prefix(head) | {"mtp.layers.1.self_attn.q_proj.weight": mx.zeros((4,))}
    weights = read_head(write(tmp_path / "two", two), model)
    with pytest.raises(ModelLoadError, match="2 blocks with attention, not one"):
        load_head(model, weights, mx.float32, dequantize=True)
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.q_proj")
    both = {f"model.layers.{i}.{name}.weight": mx.zeros((4,)) for i in (4, 5) for name in names}
    with pytest.raises(ModelLoadError, match="a chain of several draft heads"):
        read_head(write(tmp_path / "both", both), model)
    with pytest.raises(ModelLoadError, match=r"its weights do not fit the model: .*extra"):
        extra = with_prefix(head) | {"mtp.extra.weight": mx.zeros((4,))}
        load_head(model, read_head(write(tmp_path / "more", extra), model), mx.float32, dequantize=True)
    for changes, message in (
        # Scales of a weight with another number of inputs
        ({"fc.weight": mx.zeros((64, 8), mx.uint32), "fc.scales": mx.ones((64, 6))}, "fc is not quantized for 128 in"),
        (
            {"fc.weight": mx.zeros((64, 8), mx.uint32), "fc.scales": mx.ones((64, 999))},
            "fc is not quantized for 128 in",
        ),
        ({"fc.weight": mx.zeros((64, 128), mx.uint8)}, "fc.weight has the type uint8"),  # FP8 without scales
    ):
        biases = {"fc.biases": changes["fc.scales"]} if "fc.scales" in changes else {}
        weights = read_head(write(tmp_path / "other", with_prefix(head | changes | biases)), model)
        with pytest.raises(ModelLoadError, match=message):
            load_head(model, weights, mx.float32, dequantize=True)
    del head["layers.0.self_attn.q_proj.weight"]
    weights = read_head(write(tmp_path / "part", with_prefix(head)), model)
    with pytest.raises(ModelLoadError, match=r"its weights do not fit the model: .*q_proj"):
        load_head(model, weights, mx.float32, dequantize=True)
