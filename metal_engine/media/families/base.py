"""Interface of the image processing of a family of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from metal_engine.prompt_images import PIXEL_OFFSET, PIXEL_SCALE, PIXELS
from metal_engine.settings.config import VisionConfig

if TYPE_CHECKING:
    from PIL import Image

# Numbers that determine the tokens of an image, such as the rows and columns of its patches.
Grid = tuple[int, ...]
# Order of the last axes of pixels: [3, height, width], or rows of patches as [3 * n] or [n * 3].
Layout = Literal["channels, height, width", "channels within a patch", "channels within a pixel"]
# Arguments for an image processor of `transformers`, so that pixels stay integers from 0 to 255.
AS_INTEGERS = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


def integer_pixels(pixels: np.ndarray, scale: np.ndarray, offset: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """Return the encoder's inputs for pixels that the encoder itself scales (:mod:`metal_engine.prompt_images`).

    The inputs are the pixels as uint8, and scale and offset as float32 in a shape that broadcasts to the pixels. The
    encoder computes ``pixels * scale + offset``.

    Args:
        pixels: integers from 0 to 255 of any type.
        scale: factor for each channel, [3].
        offset: summand for each channel, [3].
        layout: order of the last axes of ``pixels``.
    """
    by_channel = []
    for values in (scale, offset):
        values = np.asarray(values, np.float32)
        if layout == "channels, height, width":
            values = values[:, None, None]
        elif layout == "channels within a patch":
            values = values.repeat(pixels.shape[-1] // 3)
        else:
            values = np.tile(values, pixels.shape[-1] // 3)
        by_channel.append(values)
    return {PIXELS: pixels.astype(np.uint8), PIXEL_SCALE: by_channel[0], PIXEL_OFFSET: by_channel[1]}


def scaled_by(processor: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors and the summands for each channel, [3] float64, with which a processor normalizes pixels.

    Args:
        processor: image processor of ``transformers``.
    """
    scale, offset = np.ones(3), np.zeros(3)
    if processor.do_rescale:
        scale = scale * processor.rescale_factor
    if processor.do_normalize:
        mean, deviation = (np.asarray(values, np.float64) for values in (processor.image_mean, processor.image_std))
        scale, offset = scale / deviation, offset - mean / deviation
    return scale, offset


class ImageProcessorFamily(ABC):
    """Image processing of one model: pixels to inputs of the vision encoder, and the tokens of an image in the prompt.

    A *grid* is a tuple of numbers that determines the tokens of an image, such as the rows and columns of its patches.
    Each subclass documents its grid.

    :meth:`grid` and :meth:`inputs` run in the process that decodes images. Only they need Pillow and the image
    processors of ``transformers``.

    Args:
        vision: configuration of the checkpoint.
        max_tokens: maximum number of feature tokens of an image; None for the checkpoint's own limit. Images can exceed
            it if the processor has a greater minimum.
    """

    has_axes: ClassVar[bool] = False
    """True if the rotary embedding has axes for time, height and width (M-RoPE)."""

    joins_newlines: ClassVar[bool] = False
    """True if newlines around an image and newlines of the neighbouring text form one token."""

    def __init__(self, vision: VisionConfig, max_tokens: int | None) -> None:
        self.vision = vision
        self.max_tokens = max_tokens

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of an image with this size in pixels.

        Raises:
            ValueError: the processor refuses the size.
        """

    @abstractmethod
    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        """Process an RGB image. Return its grid, and the inputs of the vision encoder by name."""

    @abstractmethod
    def segments(self, grid: Grid) -> list[str | int]:
        """Return the pieces that replace the image's placeholder in the prompt.

        A piece is a text, or a number of feature tokens, e.g. ``["<|image>", 256, "<image|>"]``.
        """

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Number of feature tokens of the largest image."""

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of feature tokens of an image."""
        return sum(segment for segment in self.segments(grid) if isinstance(segment, int))

    def axes(self, grid: Grid) -> tuple[int, int, int]:
        """Return the number of positions in time, height and width. Only for families with :attr:`has_axes`."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """Return the configuration of the image processor for ``transformers``."""
        return dict(self.vision.processor)


class EqualImages(ImageProcessorFamily):
    """Image processing in which each image has the same number of features. The grid is this number."""

    @property
    @abstractmethod
    def _processor(self) -> Any:
        """The image processor of ``transformers``."""

    @property
    def most_tokens(self) -> int:
        return self.vision.num_features

    def grid(self, width: int, height: int) -> Grid:
        return (self.vision.num_features,)

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        pixels = self._processor(images=[image], **AS_INTEGERS)["pixel_values"]
        return (self.vision.num_features,), integer_pixels(
            pixels, *scaled_by(self._processor), "channels, height, width"
        )
