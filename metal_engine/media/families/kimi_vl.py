"""Kimi-VL: patches of the image in its own size, cropped or padded to whole features.

The image processor is code in the checkpoints, which is not run. This module implements its steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from metal_engine.media.families.base import Grid, ImageProcessorFamily, integer_pixels

if TYPE_CHECKING:
    from PIL import Image

# Number of patches that position embeddings exist for, per side.
_MAX_PATCHES = 512
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class KimiVL(ImageProcessorFamily):
    """Image processing of Kimi-VL. The grid has the numbers of patches in height and width."""

    @property
    def _side(self) -> int:
        """Side of the square of pixels that becomes one feature."""
        return self.vision.patch_size * self.vision.merge_size

    @property
    def _max_patches(self) -> int:
        """Maximum number of an image's patches before padding."""
        most = int(self.vision.processor.get("in_token_limit", 4096))
        return most if self.max_tokens is None else min(most, self.max_tokens * self.vision.merge_size**2)

    @property
    def most_tokens(self) -> int:
        merge = self.vision.merge_size
        if not self.vision.processor.get("pad_input", False):
            return self._max_patches // merge**2
        longest = (_MAX_PATCHES - 1) // merge
        # An image of `rows` features has at least (rows - 1) * merge whole patches in height.
        columns = [
            min(longest, self._max_patches // max(1, (rows - 1) * merge) // merge + 1) for rows in range(1, longest + 1)
        ]
        return max(rows * count for rows, count in enumerate(columns, 1))

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the image in pixels, scaled down to the maximum number of patches."""
        patch, most = self.vision.patch_size, self._max_patches
        num_patches = (width // patch) * (height // patch)
        if num_patches <= most:
            return width, height
        scale = math.sqrt(most / num_patches)
        return int(width * scale), int(height * scale)

    def _whole(self, length: int) -> int:
        """Return the length of a side in pixels, rounded to whole features: up if images are padded, otherwise down."""
        if self.vision.processor.get("pad_input", False):
            return math.ceil(length / self._side) * self._side
        return length // self._side * self._side

    def grid(self, width: int, height: int) -> Grid:
        columns, rows = (self._whole(length) // self.vision.patch_size for length in self._scaled(width, height))
        if not rows or not columns:
            raise ValueError(f"each side must have at least {self._side} pixels")
        if max(rows, columns) >= _MAX_PATCHES:
            raise ValueError(f"each side may have {_MAX_PATCHES - 1} patches")
        return rows, columns

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        from PIL.Image import Resampling

        grid, patch = self.grid(image.width, image.height), self.vision.patch_size
        size = self._scaled(image.width, image.height)
        if size != image.size:
            image = image.resize(size, Resampling.BICUBIC)
        height, width = (length * patch for length in grid)
        left, top = max((image.width - width) // 2, 0), max((image.height - height) // 2, 0)
        image = image.crop((left, top, left + width, top + height))  # beyond its sides, the image is black
        mean, std = (
            np.array(self.vision.processor.get(name, default), np.float64)
            for name, default in (("image_mean", _MEAN), ("image_std", _STD))
        )
        patches = np.asarray(image).reshape(grid[0], patch, grid[1], patch, 3).transpose(0, 2, 4, 1, 3)
        pixels = patches.reshape(-1, 3, patch, patch)
        inputs = integer_pixels(pixels, 1 / 255 / std, -mean / std, "channels, height, width")
        return grid, {**inputs, "image_grid_hws": np.array([grid], np.int32)}

    def segments(self, grid: Grid) -> list[str | int]:
        return [grid[0] * grid[1] // self.vision.merge_size**2]
