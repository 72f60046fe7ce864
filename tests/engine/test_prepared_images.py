"""Checks of prompts with images before they enter the engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from metal_engine.engine.preparer import MAX_IMAGE_BYTES, RequestPreparer
from metal_engine.errors import ParameterError, PromptError
from metal_engine.prompt_images import AxesPositions, BidirectionalLayers, PromptImage, PromptImages
from metal_engine.sampling_params import SamplingParams
from tools.fixtures.fake_engine import fake_config, tiny_tokenizer

PROMPT = list(range(20))


def preparer(refusal: str | None = None) -> RequestPreparer:
    config = fake_config()
    scheduler = replace(config.scheduler, max_num_encoder_tokens=8, image_cache_tokens=32)
    return RequestPreparer(
        replace(config, scheduler=scheduler, model=replace(config.model, image_refusal=refusal)), tiny_tokenizer()
    )


def image(
    *positions: int, pixels: np.ndarray | None = None, bidirectional_layers: BidirectionalLayers = ""
) -> PromptImage:
    inputs = {"pixel_values": np.zeros(3, np.float32) if pixels is None else pixels}
    return PromptImage(np.array(positions, np.int32), b"a", inputs, bidirectional_layers)


def test_images_become_part_of_the_request() -> None:
    images = PromptImages((image(1, 2), image(5, 7)), AxesPositions(np.zeros((3, 20), np.int32), -2))
    prepared = preparer().prepare(PROMPT, SamplingParams(), images=images)
    assert prepared.images is images and images.num_features == 4


def test_equal_images_take_their_memory_once() -> None:
    pixels = np.zeros(MAX_IMAGE_BYTES // 2 + 1, np.uint8)
    images = PromptImages((image(1, 2, pixels=pixels), image(5, 7, pixels=pixels)))
    assert preparer().prepare(PROMPT, SamplingParams(), images=images).images is images


def test_a_model_without_an_encoder_refuses_images() -> None:
    with pytest.raises(PromptError, match="cannot be given images here: there is no tower"):
        preparer("there is no tower").prepare(PROMPT, SamplingParams(), images=PromptImages((image(1),)))


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ((image(*range(9)),), "9 tokens, more than --max-num-encoder-tokens 8"),
        ((image(1, pixels=np.zeros(MAX_IMAGE_BYTES + 1, np.uint8)),), "MiB of memory together"),
        ((image(1, 2, 3, 4, 5, 6, bidirectional_layers="every layer"),), "needs 6 tokens of one step"),
    ],
)
def test_prompts_with_images_over_a_limit_are_refused(images: tuple[PromptImage, ...], problem: str) -> None:
    with pytest.raises(PromptError, match=problem):
        preparer().prepare(PROMPT, SamplingParams(), images=PromptImages(images))


def test_prompt_logprobs_of_images_that_see_themselves() -> None:
    images = PromptImages((image(1, bidirectional_layers="every layer"),))
    with pytest.raises(ParameterError, match="prompt_logprobs"):
        preparer().prepare(PROMPT, SamplingParams(prompt_logprobs=1), images=images)


@pytest.mark.parametrize(
    "images",
    [
        PromptImages(()),
        PromptImages((image(),)),
        PromptImages((image(3, 2),)),
        PromptImages((image(1, 4), image(3, 5))),
        PromptImages((image(-1, 2),)),
        PromptImages((image(18, 19),)),
        PromptImages((image(1),), AxesPositions(np.zeros((3, 19), np.int32), 0)),
        PromptImages((image(1),), AxesPositions(np.zeros((3, 20), np.int64), 0)),
    ],
)
def test_positions_that_do_not_fit_the_prompt(images: PromptImages) -> None:
    with pytest.raises(ValueError):
        preparer().prepare(PROMPT, SamplingParams(), images=images)


def test_a_prompt_with_images_is_not_truncated() -> None:
    with pytest.raises(ParameterError, match="truncate_prompt_tokens"):
        preparer().prepare(PROMPT, SamplingParams(truncate_prompt_tokens=4), images=PromptImages((image(1),)))


def test_positions_of_output_tokens() -> None:
    axes = AxesPositions(np.arange(15, dtype=np.int32).reshape(3, 5), -2)
    assert axes.at(1, 3).tolist() == [[1, 2], [6, 7], [11, 12]]
    assert axes.at(4, 7).tolist() == [[4, 3, 4], [9, 3, 4], [14, 3, 4]]
    assert axes.at(6, 8).tolist() == [[4, 5]] * 3
