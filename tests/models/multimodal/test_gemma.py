"""Images whose tokens attend to each other: outputs by the published definition, however the steps are packed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import _get_classes

from metal_engine.errors import UnsupportedModelError
from metal_engine.models.multimodal import check
from metal_engine.models.multimodal.check import check_images
from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder
from metal_engine.models.multimodal.published_masks import _mask
from metal_engine.models.paged_model import PagedModel
from metal_engine.prompt_images import PromptImage
from tests.models.multimodal.test_generation import NUM_TOKENS, TOLERANCE
from tests.support.speculation import speculative_config
from tests.support.sweeps import diagonal
from tests.support.vision import (
    CONFIGS,
    Golden,
    VisionPrompt,
    gap,
    golden,
    make_engine,
    make_tiny_vision,
    run,
    tiny_vision,
    vision_prompt,
)
from tools.fixtures.tiny_models import spread_weights

NAMES = ["gemma3", "gemma4"]
PARTS = (
    (7, (4, 4, 1), 9),
    (23,),
    (3, (4, 4, 2), 1, (4, 4, 3), 11),
    (1, (4, 4, 1), 4, (4, 4, 4), 3),
    (40, (4, 4, 5), 20),
)
OPTIONS: tuple[dict[str, object], ...] = (
    {"budget": 512, "max_num_seqs": 1},
    {"budget": 37, "block_size": 4},
    {"budget": 23},  # the smallest budget for an image and 7 decodes
    {"budget": 48, "num_blocks": 12},
    {"budget": 40, "ahead": True, "caching": True},
    {"budget": 40, "ahead": True, "behind": True, "replay": True},
    {"budget": 64, "encoder_tokens": 24, "image_cache_tokens": 30},
    {"budget": 64, "speculative": speculative_config(3)},
)


@cache
def cases_of(name: str) -> tuple[list[VisionPrompt], list[Golden]]:
    tiny = tiny_vision(name)
    prompts = [vision_prompt(tiny, parts, seed) for seed, parts in enumerate(PARTS)]
    return prompts, [golden(tiny, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(("name", "options"), diagonal(NAMES, OPTIONS))
def test_outputs_follow_the_published_definition(name: str, options: dict[str, object]) -> None:
    prompts, expected = cases_of(name)
    engine = make_engine(tiny_vision(name), **options)
    outputs = run(engine, prompts, NUM_TOKENS)
    assert max(gap(output, one) for output, one in zip(outputs, expected, strict=True)) < TOLERANCE
    assert engine.scheduler.num_preemptions > 0 or options.get("num_blocks") is None
    assert engine.core.metrics.num_decode_forwards["replayed"] > 0 or not options.get("replay")


@pytest.mark.parametrize("name", NAMES)
def test_cached_prefixes_end_before_images(name: str) -> None:
    tiny = tiny_vision(name)
    prompts, expected = cases_of(name)
    other_end = vision_prompt(tiny, (*PARTS[3][:3], (4, 4, 9), 3), 3)  # differs in its last image
    engine = make_engine(tiny, caching=True, block_size=4)
    run(engine, [other_end], 1)
    for _ in range(2):  # the cached block up to 36 ends within the last image
        output = run(engine, [prompts[3]], NUM_TOKENS)[0]
        assert gap(output, expected[3]) < TOLERANCE
        assert output.num_cached_tokens == 20


def test_gemma_4_with_the_masks_of_mlx_vlm() -> None:
    """mlx-vlm lets images of Gemma 4 attend to themselves in every layer. Otherwise, the outputs are equal."""
    config = deepcopy(CONFIGS["gemma4"])
    config["text_config"]["sliding_window"] = 24  # more than an image
    tiny = make_tiny_vision(config)
    prompts = [vision_prompt(tiny, parts, seed) for seed, parts in enumerate(PARTS[:4])]
    own = [golden(tiny, prompt, NUM_TOKENS, is_published=False) for prompt in prompts]
    for is_published in (True, False):
        changed = prompts if is_published else [in_every_layer(prompt) for prompt in prompts]
        outputs = run(make_engine(tiny, budget=37), changed, NUM_TOKENS)
        gaps = [gap(output, one) for output, one in zip(outputs, own, strict=True)]
        with_images = [found for found, prompt in zip(gaps, prompts, strict=True) if prompt.images is not None]
        assert min(with_images) > TOLERANCE if is_published else max(gaps) < TOLERANCE


def in_every_layer(prompt: VisionPrompt) -> VisionPrompt:
    if prompt.images is None:
        return prompt
    images = tuple(replace(image, bidirectional_layers="every layer") for image in prompt.images.images)
    return replace(prompt, images=replace(prompt.images, images=images))


def test_embeddings_of_layers_take_the_padding_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the image token instead, the outputs of Gemma 4's small models differ."""
    tiny = make_tiny_vision(CONFIGS["gemma4 small"])
    prompt = vision_prompt(tiny, PARTS[0])
    expected = golden(tiny, prompt, NUM_TOKENS)
    assert gap(run(make_engine(tiny), [prompt], NUM_TOKENS)[0], expected) < TOLERANCE
    (embeddings,) = (m for name, m in tiny.paged.model.named_modules() if name.endswith("embed_tokens_per_layer"))
    embeddings.__class__ = nn.Embedding
    assert gap(run(make_engine(tiny), [prompt], NUM_TOKENS)[0], expected) > TOLERANCE


def test_masks_as_published() -> None:
    """Rows: queries. An image has the positions 2 to 4. In the second case, a window has two tokens."""
    image = PromptImage(np.arange(2, 5, dtype=np.int32), b"", {}, "every layer")
    whole = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], *[[1, 1, 1, 1, 1, 0]] * 3, [1] * 6]
    windowed = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert np.array(_mask(6, [image], None)).astype(int).tolist() == whole
    assert np.array(_mask(6, [image], 2)).astype(int).tolist() == windowed
    in_windows = PromptImage(image.positions, b"", {}, "layers with windows")
    assert np.array(_mask(6, [in_windows], 2)).astype(int).tolist() == windowed
    assert np.array_equal(np.array(_mask(6, [in_windows], None)), np.tri(6))


def parts_of(config: dict[str, Any], *, is_quantized: bool = False) -> tuple[PagedModel, MlxVlmEncoder, Any]:
    mx.random.seed(1)
    own = deepcopy(config)
    model_class, args_class = _get_classes(own)
    text = model_class(args_class.from_dict(own))
    if is_quantized and config["model_type"] == "gemma3":
        text.language_model.sanitize({})  # ties the embeddings
    spread_weights(text)
    if is_quantized:
        nn.quantize(
            text, 32, 8, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
        )
    encoder = MlxVlmEncoder(config, 64, mx.float32)
    language_model = encoder.take_language_model()
    spread_weights(encoder.model)
    paged = PagedModel(text)
    paged.add_image_encoder(encoder)
    return paged, encoder, language_model


@pytest.mark.parametrize("name", NAMES)
def test_tied_embeddings_and_quantized_layers(name: str) -> None:
    paged, encoder, language_model = parts_of(CONFIGS[name], is_quantized=True)
    assert check_images(paged, encoder, language_model) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_check_notices_a_causal_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged, encoder, language_model = parts_of(CONFIGS[name])
    monkeypatch.setattr(check, "ImageSpans", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="are off from mlx-vlm's"):
        check_images(paged, encoder, language_model)


@pytest.mark.parametrize(("name", "dtype"), [("gemma3", mx.float32), ("gemma4", mx.float32), ("gemma4", mx.bfloat16)])
def test_features_have_the_scale_of_the_text_model(name: str, dtype: mx.Dtype) -> None:
    """mlx-lm's text models scale features as embeddings, by a root that they round. The result is the tower's."""
    config = deepcopy(CONFIGS[name])
    config["text_config"]["hidden_size"] = 80
    encoder = MlxVlmEncoder(config, 80, dtype)
    encoder.take_language_model()
    sample = encoder.sample(4, 4)
    features = encoder.encode(sample.inputs, sample.num_features).embeddings
    if name == "gemma3":
        pixels = mx.array(sample.inputs["pixel_values"]).transpose(0, 2, 3, 1)
        hidden = encoder.model.vision_tower(pixels, output_hidden_states=True)[0]
        expected = encoder.model.multi_modal_projector(hidden)[0]
        scaled = features * mx.array(80**0.5, mx.bfloat16).astype(mx.float32)
    else:
        expected = encoder.model.encode_image(*map(mx.array, sample.inputs.values()))[0]
        scaled = features * 80**0.5
    found, wanted = (np.array(array.astype(mx.float32)) for array in (scaled, expected))
    assert abs(np.linalg.norm(found) / np.linalg.norm(wanted) - 1) < 1e-3
    np.testing.assert_allclose(found, wanted, rtol=1e-5 if dtype == mx.float32 else 1e-2, atol=1e-6)
