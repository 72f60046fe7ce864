"""The check at load compares a prompt with an image with mlx-vlm's forward, and notices mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_engine.errors import UnsupportedModelError
from metal_engine.models.multimodal import check, merging
from metal_engine.models.multimodal.check import check_images
from metal_engine.models.multimodal.encoder import Axes, ImageFeatures
from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder
from metal_engine.models.paged_model import PagedModel
from tests.support.vision import CONFIGS, QWEN3_VL, tiny_text_model
from tools.fixtures.tiny_models import spread_weights


def parts(
    config: dict[str, Any], change: Callable[[nn.Module], None] = lambda text: None
) -> tuple[PagedModel, MlxVlmEncoder, Any]:
    text = tiny_text_model(config)
    change(text)
    encoder = MlxVlmEncoder(config, 64, mx.float32)
    language_model = encoder.take_language_model()
    spread_weights(encoder.model)
    return PagedModel(text), encoder, language_model


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_each_family_passes(name: str) -> None:
    """Published configurations may have a list of end-of-sequence tokens, such as Gemma 3's."""
    paged, encoder, language_model = parts(CONFIGS[name] | {"eos_token_id": [1, 106]})
    paged.add_image_encoder(encoder)
    assert check_images(paged, encoder, language_model) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_vl", "kimi_vl"])
def test_a_quantized_text_model(name: str) -> None:
    """mlx-vlm's forward runs with the quantized layers of the text model, experts included."""

    def divides(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    paged, encoder, language_model = parts(
        CONFIGS[name], lambda text: nn.quantize(text, 32, 8, class_predicate=divides)
    )
    paged.add_image_encoder(encoder)
    assert check_images(paged, encoder, language_model) < 1e-4


def test_quantized_keys_and_values() -> None:
    config = QWEN3_VL | {"text_config": QWEN3_VL["text_config"] | {"head_dim": 32}}
    text = tiny_text_model(config)
    axes = {"type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    config = config | {"text_config": config["text_config"] | {"rope_scaling": axes}}
    encoder = MlxVlmEncoder(config, 64, mx.float32)
    language_model = encoder.take_language_model()
    spread_weights(encoder.model)
    paged = PagedModel(text, kv_cache_dtype="int8")
    paged.add_image_encoder(encoder)
    assert check_images(paged, encoder, language_model) < 1e-4


@pytest.mark.parametrize("mutant", ["axes", "deep layers", "features", "rows"])
def test_mistakes(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged, encoder, language_model = parts(QWEN3_VL)
    if mutant == "axes":
        encoder.axes = Axes((4, 2, 2), interleaved=False)
    own = encoder.encode

    def encode(*args: Any) -> ImageFeatures:
        features = own(*args)
        if mutant == "deep layers":
            return replace(features, by_layer=features.by_layer[::-1])
        return replace(features, embeddings=features.embeddings[::-1]) if mutant == "features" else features

    monkeypatch.setattr(encoder, "encode", encode)
    if mutant == "rows":
        step_images = merging.StepImages
        monkeypatch.setattr(check, "StepImages", lambda rows, *rest: step_images(rows * 0, *rest))
    paged.add_image_encoder(encoder)
    with pytest.raises(UnsupportedModelError, match="are off from mlx-vlm's"):
        check_images(paged, encoder, language_model)


def test_a_forward_that_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an operation fails when it runs. A conversion to NumPy then gives zeros, in both passes of the check."""
    paged, encoder, language_model = parts(QWEN3_VL)
    paged.add_image_encoder(encoder)
    forward = nn.Linear.__call__

    def failing(self: nn.Linear, x: mx.array) -> mx.array:
        output = forward(self, x)
        is_head = output.shape[-1] == paged.vocab_size
        return output + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0] if is_head else output

    monkeypatch.setattr(nn.Linear, "__call__", failing)
    with pytest.raises(RuntimeError, match="LU factorization failed"):
        check_images(paged, encoder, language_model)


@pytest.mark.parametrize("name", ["mistral3", "pixtral"])
def test_a_configuration_without_an_image_token(name: str) -> None:
    config = {field: value for field, value in CONFIGS[name].items() if not field.startswith("image_token")}
    with pytest.raises(ValueError, match=r"config\.json has none of image_token_index, image_token_id"):
        MlxVlmEncoder(config, 64, mx.float32)


def test_axes_that_do_not_fit() -> None:
    paged, encoder, _ = parts(QWEN3_VL)
    encoder.axes = Axes((4, 4, 4), interleaved=True)
    with pytest.raises(UnsupportedModelError, match="rotary embeddings"):
        paged.add_image_encoder(encoder)
