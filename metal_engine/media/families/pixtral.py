"""Pixtral and Mistral 3: patches of the resized image, with a mark after each row."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from metal_engine.media.families.base import AS_INTEGERS, Grid, ImageProcessorFamily, integer_pixels, scaled_by

if TYPE_CHECKING:
    from PIL import Image

_ROW_END, _IMAGE_END = "[IMG_BREAK]", "[IMG_END]"


class Pixtral(ImageProcessorFamily):
    """Image processing of Pixtral and Mistral 3. The grid has the numbers of features in height and width."""

    @property
    def _side(self) -> int:
        """Side of the square of pixels that becomes one feature."""
        return self.vision.patch_size * self.vision.merge_size

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        processor = PixtralImageProcessorPil.from_dict(self._settings())
        if self.max_tokens is not None:
            longest = math.isqrt(self.max_tokens) * self._side
            processor.size = {"longest_edge": min(processor.size["longest_edge"], longest)}
        return processor

    @property
    def most_tokens(self) -> int:
        return int((-(-self._processor.size["longest_edge"] // self._side)) ** 2)

    def grid(self, width: int, height: int) -> Grid:
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        longest = self._processor.size["longest_edge"]
        sizes = get_resize_output_image_size(
            np.empty((3, height, width), np.bool_), longest, self._side, input_data_format="channels_first"
        )
        return tuple(size // self._side for size in sizes)

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        found = self._processor(images=[image], patch_size=self._side, **AS_INTEGERS)
        sizes = np.asarray(found["image_sizes"], np.int32)
        pixels = np.asarray(found["pixel_values"])
        inputs = integer_pixels(pixels, *scaled_by(self._processor), "channels, height, width")
        return tuple(int(size) // self._side for size in sizes[0]), {**inputs, "image_sizes": sizes}

    def segments(self, grid: Grid) -> list[str | int]:
        height, width = grid
        rows: list[str | int] = [width, _ROW_END] * height
        return [*rows[:-1], _IMAGE_END]
