"""Converts images of prompts to parts of messages and back (:mod:`metal_engine.engine.process.wire`)."""

from __future__ import annotations

import numpy as np

from metal_engine.engine.process.wire import Array, Image, Images
from metal_engine.images import AxesPositions, PromptImage, PromptImages


def packed_images(images: PromptImages | None) -> Images | None:
    """Return the images of a prompt as a part of a message."""
    if images is None:
        return None
    packed: list[Image] = []
    sent: set[bytes] = set()
    for image in images.images:
        inputs = {} if image.content_hash in sent else {name: _packed(array) for name, array in image.inputs.items()}
        sent.add(image.content_hash)
        packed.append(Image(image.positions.tobytes(), image.content_hash, inputs, image.sees_itself))
    axes = images.axes
    return Images(packed, None if axes is None else (axes.prompt.tobytes(), axes.delta))


def unpacked_images(images: Images | None) -> PromptImages | None:
    """Return the images of :func:`packed_images`."""
    if images is None:
        return None
    unpacked: list[PromptImage] = []
    received: dict[bytes, dict[str, np.ndarray]] = {}
    for image in images.images:
        if image.content_hash not in received:
            received[image.content_hash] = {name: _unpacked(array) for name, array in image.inputs.items()}
        positions = np.frombuffer(image.positions, np.int32)
        unpacked.append(PromptImage(positions, image.content_hash, received[image.content_hash], image.sees_itself))
    axes = None
    if images.axes is not None:
        prompt, delta = images.axes
        axes = AxesPositions(np.frombuffer(prompt, np.int32).reshape(3, -1), delta)
    return PromptImages(tuple(unpacked), axes)


def _packed(array: np.ndarray) -> Array:
    return Array(array.dtype.str, list(array.shape), array.tobytes())


def _unpacked(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
