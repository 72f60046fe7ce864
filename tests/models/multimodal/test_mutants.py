"""The comparison with mlx-vlm notices mistakes; and images with equal tokens do not share cached prefixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from metal_engine.models.multimodal.encoder import ImageFeatures
from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder
from metal_engine.prompt_images import AxesPositions, PromptImage
from metal_engine.runner.image_rows import ImageRows, ImageTable
from metal_engine.scheduling import prefix_cache
from tests.models.multimodal.test_generation import NUM_TOKENS, TOLERANCE
from tests.support.vision import (
    TinyVision,
    VisionPrompt,
    content_hash,
    gap,
    golden,
    make_engine,
    run,
    tiny_vision,
    vision_prompt,
)

PARTS = ((7, (4, 6, 1), 9), (3, (2, 2, 2), 2, (6, 4, 3), 11))


@pytest.fixture(scope="module")
def tiny() -> TinyVision:
    return tiny_vision("qwen3_vl")


def gaps(tiny: TinyVision, prompts: list[VisionPrompt], expected: list[VisionPrompt] | None = None) -> list[float]:
    outputs = run(make_engine(tiny, budget=16), prompts, NUM_TOKENS)
    wanted = [golden(tiny, prompt, NUM_TOKENS) for prompt in expected or prompts]
    return [gap(output, one) for output, one in zip(outputs, wanted, strict=True)]


def with_axes(prompt: VisionPrompt, axes: AxesPositions | None) -> VisionPrompt:
    assert prompt.images is not None
    return replace(prompt, images=replace(prompt.images, axes=axes))


def axes_of(prompt: VisionPrompt) -> AxesPositions:
    assert prompt.images is not None and prompt.images.axes is not None
    return prompt.images.axes


def test_without_a_mistake(tiny: TinyVision) -> None:
    assert max(gaps(tiny, [vision_prompt(tiny, parts) for parts in PARTS])) < TOLERANCE


@pytest.mark.parametrize("mutant", ["one axis", "no delta", "axes swapped", "shifted"])
def test_wrong_positions(tiny: TinyVision, mutant: str) -> None:
    prompts = [vision_prompt(tiny, parts) for parts in PARTS]
    changed = []
    for prompt in prompts:
        axes = axes_of(prompt)
        wrong = {
            "one axis": None,
            "no delta": replace(axes, delta=0),
            "axes swapped": replace(axes, prompt=axes.prompt[[0, 2, 1]]),
            "shifted": replace(axes, prompt=np.roll(axes.prompt, 1, axis=1)),
        }
        changed.append(with_axes(prompt, wrong[mutant]))
    assert min(gaps(tiny, changed, prompts)) > TOLERANCE


def test_no_features_after_layers(tiny: TinyVision, monkeypatch: pytest.MonkeyPatch) -> None:
    own = MlxVlmEncoder.encode

    def encode(self: MlxVlmEncoder, *args: object) -> ImageFeatures:
        features = own(self, *args)  # type: ignore[arg-type]
        return replace(features, by_layer=tuple(0 * array for array in features.by_layer))

    monkeypatch.setattr(MlxVlmEncoder, "encode", encode)
    assert min(gaps(tiny, [vision_prompt(tiny, parts) for parts in PARTS])) > TOLERANCE


def other_image(image: PromptImage) -> PromptImage:
    inputs = dict(image.inputs) | {"pixel_values": -image.inputs["pixel_values"]}
    return replace(image, content_hash=content_hash(inputs), inputs=inputs)


def test_another_image(tiny: TinyVision) -> None:
    prompts = [vision_prompt(tiny, parts) for parts in PARTS]
    changed = []
    for prompt in prompts:
        assert prompt.images is not None
        images = tuple(map(other_image, prompt.images.images))
        changed.append(replace(prompt, images=replace(prompt.images, images=images)))
    assert min(gaps(tiny, changed, prompts)) > TOLERANCE


def test_features_of_another_image_of_the_prompt(tiny: TinyVision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both images have the same size, so that only their features differ."""
    own = ImageTable.rows

    def swapped(self: ImageTable, *args: Any, **kwargs: Any) -> ImageRows | None:
        images = own(self, *args, **kwargs)
        if images is None or len({source[0] for source in images.sources}) < 2:
            return images
        (a, *of_a), (b, *of_b) = images.sources
        return replace(images, sources=((b, *of_a), (a, *of_b)))

    prompt = vision_prompt(tiny, (1, (2, 2, 1), 2, (2, 2, 4), 3))
    assert max(gaps(tiny, [prompt])) < TOLERANCE
    monkeypatch.setattr(ImageTable, "rows", swapped)
    assert min(gaps(tiny, [prompt])) > TOLERANCE


@pytest.mark.parametrize("mutant", ["", "hashes of blocks without images", "two images with one hash"])
def test_equal_tokens_with_different_images(tiny: TinyVision, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts have images a, b and a, and the third finds the prefix of the first."""
    first = vision_prompt(tiny, (21, (4, 6, 1), 9))
    assert first.images is not None
    other = other_image(first.images.images[0])
    second = replace(first, images=replace(first.images, images=(other,)), inputs=dict(other.inputs))
    expected = [golden(tiny, prompt, NUM_TOKENS) for prompt in (first, second, first)]
    if mutant == "hashes of blocks without images":
        monkeypatch.setattr(prefix_cache, "_image_parts", lambda *args: {})
    if mutant == "two images with one hash":
        other = replace(other, content_hash=first.images.images[0].content_hash)
        second = replace(second, images=replace(first.images, images=(other,)))
    engine = make_engine(tiny, block_size=4, caching=True)
    outputs = [run(engine, [prompt], NUM_TOKENS)[0] for prompt in (first, second, first)]
    found = [gap(output, one) < TOLERANCE for output, one in zip(outputs, expected, strict=True)]
    assert found == [True, not mutant, True]
    if not mutant:
        assert [output.num_cached_tokens for output in outputs] == [0, 20, 52]
        assert engine.stats.images_encoded == 2  # the third prompt computes no token of its image
