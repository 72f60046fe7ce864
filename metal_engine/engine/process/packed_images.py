"""Converts images of prompts to parts of messages and back (:mod:`metal_engine.engine.process.wire`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from metal_engine.engine.process.wire import Array, Image, ImageInputs, Images, checked
from metal_engine.prompt_images import AxesPositions, PromptImage, PromptImages

InputArrays = Mapping[str, np.ndarray]


def packed_images(images: PromptImages | None, keys: Mapping[bytes, int]) -> Images | None:
    """Return the images of a prompt as a part of a message; None without images.

    Args:
        keys: map from the content hash of each image to the key of its :class:`ImageInputs`.
    """
    if images is None:
        return None
    packed = [
        Image(image.positions.tobytes(), image.content_hash, keys[image.content_hash], image.bidirectional_layers)
        for image in images.images
    ]
    axes = images.axes
    return Images(packed, None if axes is None else (axes.prompt.tobytes(), axes.delta))


def unpacked_images(images: Images | None, inputs: Mapping[int, InputArrays]) -> PromptImages | None:
    """Return the images of a prompt from the result of :func:`packed_images`.

    Call it in the context :func:`checked`, which converts the errors of an invalid message to a WireError.

    Args:
        inputs: map from the keys of :class:`ImageInputs` to their arrays.
    """
    if images is None:
        return None
    unpacked: list[PromptImage] = []
    for image in images.images:
        positions = np.frombuffer(image.positions, np.int32)
        unpacked.append(PromptImage(positions, image.content_hash, inputs[image.key], image.bidirectional_layers))
    axes = None
    if images.axes is not None:
        prompt, delta = images.axes
        axes = AxesPositions(np.frombuffer(prompt, np.int32).reshape(3, -1), delta)
    return PromptImages(tuple(unpacked), axes)


def packed_inputs(key: int, inputs: InputArrays) -> ImageInputs:
    """Return the message with the inputs of an image."""
    arrays = {name: Array(one.dtype.str, list(one.shape), one.tobytes()) for name, one in inputs.items()}
    return ImageInputs(key, arrays)


def unpacked_inputs(message: ImageInputs) -> InputArrays:
    """Return the encoder inputs of an image from the result of :func:`packed_inputs`. Raises WireError."""
    with checked():
        return {
            name: np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
            for name, array in message.inputs.items()
        }
