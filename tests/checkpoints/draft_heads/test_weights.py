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
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

from metal_engine.checkpoints.draft_heads.weights import read_head
from metal_engine.errors import ModelLoadError
from metal_engine.models.draft_head import DraftHead, load_head
from tests.support.draft_heads import random_head
from tests.support.tiny_engine import tiny_reference

Weights = dict[str, mx.array]
MODEL_TENSOR = {"model.language_model.embed_tokens.weight": mx.zeros((4, 4))}


def flat(head: DraftHead) -> Weights:
    return dict(tree_flatten(head.parameters()))


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
    found = flat(load_head(model, read_head(place, model), mx.float32, dequantize=True))
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


@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_mlx_vlm_shifts_norms_by_the_prefix(dense: nn.Module, dense_head: Weights, prefix: str, tmp_path: Path) -> None:
    """A head in the form of mlx-vlm needs no "norms"."""
    weights = with_prefix(shifted(dense_head)) if prefix else dense_head
    check(write(tmp_path, weights, {"model_type": "qwen3_5_mtp"}), dense, dense_head)
    by_mlx_vlm = Qwen3_5MTPDraftModel.sanitize(None, weights)
    assert all(mx.allclose(by_mlx_vlm[name], array, atol=1e-6) for name, array in dense_head.items())


def test_heads_with_an_unknown_norm_convention_are_refused(
    dense: nn.Module, dense_head: Weights, tmp_path: Path
) -> None:
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
    (path.parent / f"._{path.name}").write_bytes(b"attributes of a file")  # as macOS does
    check(tmp_path, model, head)
    check(path, model, head)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_a_quantized_head(mode: str, tmp_path: Path) -> None:
    """Mode, bits and group sizes are those of the stored arrays, module by module."""
    model = tiny_reference()
    head = random_head(model)
    expected = flat(head)
    form = {"mode": mode} if mode != "affine" else {"group_size": 32, "bits": 4}
    forms = {"fc": {"group_size": 32, "bits": 8}, "layers.0.mlp.down_proj": form}
    nn.quantize(head, class_predicate=lambda path, module: forms.get(path, False))
    weights = read_head(write(tmp_path, with_prefix(flat(head))), model)
    check(tmp_path, model, expected, atol=0.2)
    kept = load_head(model, weights, mx.float32, dequantize=False)
    assert isinstance(kept.fc, nn.QuantizedLinear) and kept.fc.bits == 8
    down, stored = kept.layers[0].mlp.down_proj, head.layers[0].mlp.down_proj
    assert isinstance(down, nn.QuantizedLinear)
    assert (down.mode, down.bits, down.group_size) == (mode, stored.bits, stored.group_size)
    assert isinstance(kept.layers[0].mlp.up_proj, nn.Linear)


def test_experts_in_nvfp4_keep_a_scale_for_each_expert(tmp_path: Path) -> None:
    model = tiny_reference(architecture="qwen3_next")
    head = random_head(model)
    expected = flat(head)

    def form(path: str, module: nn.Module) -> dict[str, Any] | bool:
        quantization = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}
        return quantization if isinstance(module, SwitchLinear) else False

    nn.quantize(head, class_predicate=form)
    stored = flat(head)
    place = write(tmp_path, with_prefix(stored), {"norms": "unshifted"})
    check(place, model, expected, atol=0.2)
    kept = flat(load_head(model, read_head(place, model), mx.bfloat16, dequantize=False))
    scales = [name for name in stored if name.endswith(".global_scale")]
    assert scales and all(mx.array_equal(kept[name], stored[name]) for name in scales)


@pytest.mark.parametrize("block", [None, [32, 48]])
def test_fp8_with_a_scale_for_each_block(
    block: list[int] | None, dense: nn.Module, dense_head: Weights, tmp_path: Path
) -> None:
    """As Qwen publishes, with shifted norms. Blocks are 128 x 128, unless the configuration names another size."""
    expected = dict(dense_head)
    rng, weights = np.random.default_rng(0), {}
    for name, array in shifted(dense_head).items():
        if array.ndim < 2:
            weights[name] = array
            continue
        sizes = block or [128, 128]
        scales = 2.0 ** rng.integers(-3, 4, [-(-n // size) for n, size in zip(array.shape, sizes, strict=True)])
        each = mx.array(np.kron(scales, np.ones(sizes))[: array.shape[0], : array.shape[1]].astype(np.float32))
        weights[name] = mx.to_fp8(array / each)
        weights[f"{name}_scale_inv"] = mx.array(scales, mx.bfloat16)
        expected[name] = mx.from_fp8(weights[name], mx.float32) * each
    config = {} if block is None else {"quantization_config": {"weight_block_size": block}}
    place = write(tmp_path, with_prefix(weights), config)
    name_bytes_fp8(place / "model.safetensors")
    check(place, dense, expected)


def name_bytes_fp8(path: Path) -> None:
    """Change the type of byte tensors in a safetensors file to the type of FP8 numbers."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(b'"U8"', b'"F8_E4M3"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_embedding_table(is_quantized: bool, tmp_path: Path) -> None:
    """A copy of the model's table is left out. Another table is the head's own."""
    model = tiny_reference()
    expected = flat(random_head(model))
    table = model.model.embed_tokens.weight

    def stored(array: mx.array) -> Weights:
        kinds, parts = ("weight", "scales", "biases"), mx.quantize(array, group_size=32, bits=8)
        return dict(zip(kinds, parts, strict=True)) if is_quantized else {"weight": array}

    for array, is_own in ((table, False), (table[::-1], True)):
        weights = expected | {f"embed_tokens.{kind}": part for kind, part in stored(array).items()}
        own = {"embed_tokens.weight": array} if is_own else {}
        check(write(tmp_path, with_prefix(weights)), model, expected | own, atol=0.02)


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
        (
            {"fc.weight": mx.zeros((64, 32), mx.uint32), "fc.scales": mx.ones((64, 8), mx.uint8)},
            "fc is not quantized for 128 in",  # No mode has 8 bits and groups of 16
        ),
        ({"fc.weight": mx.zeros((64, 128), mx.uint8)}, "fc.weight has the type uint8"),  # FP8 without scales
        ({"fc.weight": mx.full((64, 128), mx.nan)}, "fc.weight has NaN or infinite values"),
        ({"layers.0.mlp.up_proj.weight": mx.full((128, 64), mx.inf)}, "up_proj.weight has NaN or infinite values"),
    ):
        biases = {"fc.biases": changes["fc.scales"]} if "fc.scales" in changes else {}
        weights = read_head(write(tmp_path / "other", with_prefix(head | changes | biases)), model)
        with pytest.raises(ModelLoadError, match=message):
            load_head(model, weights, mx.float32, dequantize=True)
    fp8 = {"fc.weight": mx.zeros((64, 128), mx.uint8)}
    for changes, config, message in (
        ({"fc.weight_scale_inv": mx.ones((1, 1))}, {}, "fc.weight has scales of FP8 numbers, but is not"),
        (
            fp8 | {"fc.weight_scale_inv": mx.ones((1, 2))},
            {},
            "fc.weight is not quantized in FP8 by blocks of 128 x 128",
        ),
        ({"more.weight_scale_inv": mx.ones((1, 1))}, {}, "mtp.more.weight_scale_inv without the weight"),
        ({}, {"quantization_config": {"weight_block_size": 128}}, "weight_block_size must be two sizes, not 128"),
        ({}, {"fc_input": ["hidden"]}, r"fc_input must be .* or .*, not \['hidden'\]"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            read_head(write(tmp_path / "fp8", with_prefix(head | changes), config), model)
    del head["layers.0.self_attn.q_proj.weight"]
    weights = read_head(write(tmp_path / "part", with_prefix(head)), model)
    with pytest.raises(ModelLoadError, match=r"its weights do not fit the model: .*q_proj"):
        load_head(model, weights, mx.float32, dequantize=True)
