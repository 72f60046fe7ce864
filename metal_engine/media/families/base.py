"""Interface of the image processing of a family of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from metal_engine.settings.config import VisionConfig

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# Numbers that determine the tokens of an image, such as the rows and columns of its patches.
Grid = tuple[int, ...]


class ImageFamily(ABC):
    """Image processing of one model: pixels to inputs of the encoder, and the tokens of an image in the prompt.

    :meth:`grid` and :meth:`inputs` run in the process that decodes images. Only they need Pillow and the image
    processors of ``transformers``.

    Args:
        vision: configuration of the checkpoint.
        max_tokens: maximum number of an image's tokens, as far as the processor allows it; None for the checkpoint's
            own limit.
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
        """Return the grid of an image of this size. Raises ValueError if the processor refuses the size."""

    @abstractmethod
    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        """Return the grid of an RGB image, and the inputs of the encoder by name."""

    @abstractmethod
    def segments(self, grid: Grid) -> list[str | int]:
        """Return the text that replaces the image's placeholder. A number is a number of feature tokens."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Number of feature tokens of the largest image."""

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of feature tokens of an image."""
        return sum(segment for segment in self.segments(grid) if isinstance(segment, int))

    def axes(self, grid: Grid) -> tuple[int, int, int]:
        """Return the number of positions in time, height and width, for a family with axes."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """Return the configuration of the image processor for ``transformers``."""
        return dict(self.vision.processor)


class EqualImages(ImageFamily):
    """Image processing that gives each image the same number of features. The grid has only this number."""

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
        found = self._processor(images=[image], return_tensors="np")
        return (self.vision.num_features,), {"pixel_values": found["pixel_values"].astype("float32", copy=False)}
