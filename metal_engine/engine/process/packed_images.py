"""Converts images of prompts to parts of messages and back (:mod:`metal_engine.engine.process.wire`)."""

from __future__ import annotations

import numpy as np

from metal_engine.engine.process.wire import Array, Image, Images
from metal_engine.images import AxesPositions, PromptImage, PromptImages


def packed_images(images: PromptImages | None) -> Images | None:
    """Return the images of a prompt as a part of a message."""
    if images is None:
        return None
    packed = [
        Image(
            image.positions.tobytes(),
            image.content_hash,
            {name: _packed(array) for name, array in image.inputs.items()},
            image.sees_itself,
        )
        for image in images.images
    ]
    axes = images.axes
    return Images(packed, None if axes is None else (axes.prompt.tobytes(), axes.delta))


def unpacked_images(images: Images | None) -> PromptImages | None:
    """Return the images of :func:`packed_images`."""
    if images is None:
        return None
    unpacked = [
        PromptImage(
            np.frombuffer(image.positions, np.int32),
            image.content_hash,
            {name: _unpacked(array) for name, array in image.inputs.items()},
            image.sees_itself,
        )
        for image in images.images
    ]
    axes = None
    if images.axes is not None:
        prompt, delta = images.axes
        axes = AxesPositions(np.frombuffer(prompt, np.int32).reshape(3, -1), delta)
    return PromptImages(tuple(unpacked), axes)


def _packed(array: np.ndarray) -> Array:
    return Array(array.dtype.str, list(array.shape), array.tobytes())


def _unpacked(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
