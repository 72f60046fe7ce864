"""Images of prompts as plain data: the positions of their tokens, their content hash, and the inputs of the encoder.

Image processors create this data. The preparer, the scheduler and the runner use it. It does not depend on MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

# Names of inputs of the encoder. Pixels are float, or 8-bit integers with a factor and a summand, which broadcast.
PIXELS, PIXEL_SCALE, PIXEL_OFFSET = "pixel_values", "pixel_scale", "pixel_offset"

BidirectionalLayers = Literal["", "every layer", "layers with windows"]
"""Layers in which each token of an image attends to later tokens of the same image. Empty: no layer."""


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image in a prompt. The encoder computes one feature for each of the image's tokens.

    Attributes:
        positions: [F] int32, rising: prompt positions whose embeddings the features replace. Text tokens, such as row
            ends, may stand between them.
        content_hash: hash of everything that determines the features for a given model: pixels, sizes, options of the
            image processor.
        inputs: inputs of the encoder, by the parameter names of the model's image processor. Pixels may be 8-bit
            integers (:data:`PIXELS`), which take a quarter of the memory.
        bidirectional_layers: layers in which each token of the image attends to later tokens of the image. The
            positions of such an image are consecutive, and a chunk must not cut the image.
    """

    positions: np.ndarray
    content_hash: bytes
    inputs: Mapping[str, np.ndarray] = field(repr=False)
    bidirectional_layers: BidirectionalLayers = ""

    @property
    def start(self) -> int:
        """Position of the first token of the image."""
        return int(self.positions[0])

    @property
    def stop(self) -> int:
        """Position after the last token of the image."""
        return int(self.positions[-1]) + 1

    @property
    def num_features(self) -> int:
        return len(self.positions)

    def features_in(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range (first, end) of the features at positions from ``start`` to ``stop`` - 1."""
        first, end = np.searchsorted(self.positions, (start, stop))
        return int(first), int(end)


@dataclass(frozen=True, eq=False)
class AxesPositions:
    """Rotary positions of a prompt on three axes: time, height and width (M-RoPE).

    Attributes:
        prompt: [3, P] int32, positions of the P prompt tokens.
        delta: offset of output tokens: the position of a later token is its index + ``delta`` on each axis.
    """

    prompt: np.ndarray
    delta: int

    def at(self, start: int, stop: int) -> np.ndarray:
        """Return the rotary positions of the tokens with index ``start`` to ``stop`` - 1, [3, stop - start] int32."""
        num_prompt = self.prompt.shape[1]
        if stop <= num_prompt:
            return self.prompt[:, start:stop]
        output = np.arange(max(start, num_prompt), stop, dtype=np.int32) + np.int32(self.delta)
        return np.concatenate([self.prompt[:, start:num_prompt], np.broadcast_to(output, (3, len(output)))], axis=1)


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of a prompt, in order of their positions.

    Attributes:
        images: images, at least one. They do not overlap, and a text token follows the last image.
        axes: rotary positions of the prompt; None if the model's rotary embedding has one axis.
    """

    images: tuple[PromptImage, ...]
    axes: AxesPositions | None = None

    @property
    def bidirectional_layers(self) -> BidirectionalLayers:
        """Value of :attr:`PromptImage.bidirectional_layers`, equal for all images."""
        return self.images[0].bidirectional_layers

    @property
    def num_features(self) -> int:
        """Number of prompt tokens that stand for images."""
        return sum(image.num_features for image in self.images)

    def num_features_in(self, start: int, stop: int) -> int:
        """Return the number of prompt tokens from position ``start`` to ``stop`` - 1 that stand for images."""
        ranges = (image.features_in(start, stop) for image in self.images if image.start < stop and image.stop > start)
        return sum(end - first for first, end in ranges)

    def check(self, num_prompt_tokens: int) -> None:
        """Check the positions of all images, and that a text token ends the prompt. Raises ValueError with the reason.

        Also checks the dtype and shape of ``axes``.
        """
        stop = 0
        for image in self.images:
            positions = image.positions
            if positions.dtype != np.int32 or positions.ndim != 1 or not len(positions):
                raise ValueError("positions of an image are not a list of int32")
            if positions[0] < stop or (np.diff(positions) <= 0).any():
                raise ValueError("positions of images do not rise")
            stop = image.stop
            if image.bidirectional_layers and len(positions) != image.stop - image.start:
                raise ValueError("an image whose tokens attend to each other has text between its tokens")
        if not self.images or stop >= num_prompt_tokens:
            raise ValueError("a prompt with images must end with a text token")
        if self.axes is not None and (
            self.axes.prompt.dtype != np.int32 or self.axes.prompt.shape != (3, num_prompt_tokens)
        ):
            raise ValueError("rotary positions are not int32 [3, prompt tokens]")
