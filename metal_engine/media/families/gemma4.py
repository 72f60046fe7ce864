"""Gemma 4: patches of the resized image, averaged over squares, between two marks."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from metal_engine.media.families.base import AS_INTEGERS, Grid, ImageProcessorFamily, integer_pixels, scaled_by

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# Possible limits of an image's tokens.
_LIMITS = (1120, 560, 280, 140, 70)


class Gemma4(ImageProcessorFamily):
    """Image processing of Gemma 4. The grid has the numbers of rows and columns of features."""

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        processor = Gemma4ImageProcessorPil.from_dict(self._settings())
        most = processor.max_soft_tokens if self.max_tokens is None else min(processor.max_soft_tokens, self.max_tokens)
        processor.max_soft_tokens = next((limit for limit in _LIMITS if limit <= most), _LIMITS[-1])
        return processor

    @property
    def most_tokens(self) -> int:
        return int(self._processor.max_soft_tokens)

    def grid(self, width: int, height: int) -> Grid:
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        processor = self._processor
        patch, side = processor.patch_size, processor.pooling_kernel_size
        max_patches = processor.max_soft_tokens * side**2
        sides = get_aspect_ratio_preserving_size(height, width, patch, max_patches, side)
        return sides[0] // (patch * side), sides[1] // (patch * side)

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        found = self._processor(images=[image], **AS_INTEGERS)
        grid = self.grid(*image.size)
        num_patches = grid[0] * grid[1] * self._processor.pooling_kernel_size**2  # the processor appends padding
        pixels, positions = (found[name][:, :num_patches] for name in ("pixel_values", "image_position_ids"))
        inputs = integer_pixels(pixels, *scaled_by(self._processor), "channels within a pixel")
        return grid, {**inputs, "image_position_ids": positions.astype("int32")}

    def segments(self, grid: Grid) -> list[str | int]:
        return ["<|image>", grid[0] * grid[1], "<image|>"]
