"""Encoders compute the same features from 8-bit pixels as from normalized pixels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.prompt_images import PIXEL_OFFSET, PIXEL_SCALE, PIXELS
from tests.support.vision import CONFIGS, tiny_vision

SCALE, OFFSET = np.float32(1 / 127), np.float32(-1.1)


@pytest.mark.parametrize("name", CONFIGS)
def test_features_equal_those_of_normalized_pixels(name: str) -> None:
    encoder = tiny_vision(name).encoder
    sample = encoder.sample(4, 6)
    shape, rng = sample.inputs[PIXELS].shape, np.random.default_rng(1)
    integers = rng.integers(0, 256, shape, np.uint8)
    normalized = integers * SCALE + OFFSET
    inputs: dict[str, Any] = dict(sample.inputs)
    if "spatial_shapes" in inputs:  # LFM2-VL pads patches; the goldens pad with zeros after the normalization
        padding = ((0, 0), (0, 7), (0, 0))
        integers, normalized = np.pad(integers, padding), np.pad(normalized, padding)
        inputs["pixel_attention_mask"] = np.pad(inputs["pixel_attention_mask"], padding[:2])
    expected = encoder.encode({**inputs, PIXELS: normalized}, sample.num_features)
    if inputs.get("pixel_attention_mask") is not None and "spatial_shapes" not in inputs:
        inputs["pixel_attention_mask"] = inputs["pixel_attention_mask"].astype(np.bool_)
    scaled = {PIXELS: integers, PIXEL_SCALE: np.full(shape[-1], SCALE), PIXEL_OFFSET: np.full(shape[-1], OFFSET)}
    found = encoder.encode({**inputs, **scaled}, sample.num_features)
    for ours, theirs in zip(found.arrays, expected.arrays, strict=True):
        assert mx.allclose(ours, theirs, rtol=0, atol=1e-4 * float(mx.abs(theirs).max())), name
        assert float(mx.abs(theirs).max()) > 0
