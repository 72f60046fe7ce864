"""Interface of image encoders, which compute the features of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from metal_engine.prompt_images import BidirectionalLayers


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image. The image has F tokens in the prompt, with one feature each.

    Attributes:
        embeddings: features that replace the embeddings of the image's tokens, [F, hidden_size].
        by_layer: features that are added to the outputs of the first layers (deepstack), [F, hidden_size] for each of
            these layers.
    """

    embeddings: mx.array
    by_layer: tuple[mx.array, ...] = ()

    @property
    def arrays(self) -> list[mx.array]:
        return [self.embeddings, *self.by_layer]


@dataclass(frozen=True)
class SampleImage:
    """Random inputs of an encoder for one image, and the number of its features."""

    inputs: dict[str, np.ndarray]
    num_features: int


@dataclass(frozen=True)
class Axes:
    """Assignment of rotary frequencies to the axes time, height and width (M-RoPE).

    Attributes:
        sections: number of frequencies of each axis.
        interleaved: True if the axes alternate (Qwen3-VL). False if they follow one another (Qwen2-VL).
    """

    sections: tuple[int, int, int]
    interleaved: bool

    def of_frequencies(self, count: int) -> np.ndarray:
        """Return the axis of each of ``count`` frequencies, [count] int32."""
        axis = np.zeros(count, np.int32)
        if self.interleaved:
            for a in (1, 2):
                axis[a : 3 * self.sections[a] : 3] = a
        else:
            ends = np.cumsum(self.sections)
            axis[ends[0] : ends[1]] = 1
            axis[ends[1] : ends[2]] = 2
        return axis


class ImageEncoder(Protocol):
    """Computes features of images.

    Attributes:
        axes: axes of the text model's rotary embeddings; None if they have one axis.
        num_deep_layers: number of the text model's first layers to whose outputs features are added (deepstack).
        bidirectional_layers: layers in which an image's tokens attend to each other
            (:class:`metal_engine.prompt_images.PromptImage`).
    """

    axes: Axes | None
    num_deep_layers: int
    bidirectional_layers: BidirectionalLayers

    def encode(self, inputs: Mapping[str, np.ndarray], num_features: int) -> ImageFeatures:
        """Return the features of one image, not evaluated yet.

        Args:
            inputs: outputs of the model's image processor for one image, by name, e.g. ``pixel_values``.
            num_features: number of the image's features.
        """

    def parameters(self) -> dict[str, Any]:
        """Return the encoder's weights by name."""

    def sample(self, rows: int, columns: int) -> SampleImage:
        """Return a random image of about ``rows`` times ``columns`` features.

        An encoder that takes only one size, or only whole tiles, returns an image with another number of features.
        """
