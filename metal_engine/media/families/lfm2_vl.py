"""LFM2-VL: tiles of a large image and a thumbnail, or the resized image, as padded lists of patches.

The checkpoints' image processor needs PyTorch, so this module implements its steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from metal_engine.media.families.base import Grid, ImageProcessorFamily, integer_pixels

if TYPE_CHECKING:
    from PIL import Image

_START, _END, _THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


class Lfm2VL(ImageProcessorFamily):
    """Image processing of LFM2-VL.

    The grid has the rows and columns of tiles, and the rows and columns of features of the resized image.
    """

    @property
    def _patch(self) -> int:
        return int(self._setting("encoder_patch_size", 16))

    @property
    def _side(self) -> int:
        """Side of the square of pixels that becomes one feature."""
        return self._patch * int(self._setting("downsample_factor", 2))

    @property
    def _tile(self) -> int:
        return int(self._setting("tile_size", 512))

    @property
    def _max_features(self) -> int:
        """Maximum number of features of the resized image."""
        most = int(self._setting("max_image_tokens", 256))
        return most if self.max_tokens is None else min(most, self.max_tokens)

    @property
    def _max_tiles(self) -> int:
        if not self._setting("do_image_splitting", True):
            return 1
        most = int(self._setting("max_tiles", 10))
        if self.max_tokens is None:
            return most
        return min(most, (self.max_tokens - self._max_features) // (self._tile // self._side) ** 2)

    @property
    def most_tokens(self) -> int:
        if self._max_tiles < int(self._setting("min_tiles", 2)):
            return self._max_features
        whole = self._max_features if self._setting("use_thumbnail", True) else 0
        return max(self._max_features, self._max_tiles * self._tile_features + whole)

    @property
    def _tile_features(self) -> int:
        return math.ceil(self._tile // self._patch / int(self._setting("downsample_factor", 2))) ** 2

    def _setting(self, name: str, default: float) -> float:
        return float(self.vision.processor.get(name, default))

    def grid(self, width: int, height: int) -> Grid:
        resized = self._resized(width, height)
        features = resized[1] // self._side, resized[0] // self._side
        return (*self._tiles(width, height), *features)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in pixels of the image as one view.

        Both are multiples of a feature's side. The number of features is within the processor's limits.
        """
        side = self._side
        least, most = int(self._setting("min_image_tokens", 64)) * side**2, self._max_features * side**2
        rounded = [max(side, round(length / side) * side) for length in (width, height)]
        if rounded[0] * rounded[1] > most:
            scale = math.sqrt(width * height / most)
            rounded = [max(side, math.floor(length / scale / side) * side) for length in (width, height)]
        elif rounded[0] * rounded[1] < least:
            scale = math.sqrt(least / (width * height))
            rounded = [math.ceil(length * scale / side) * side for length in (width, height)]
        return rounded[0], rounded[1]

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of tiles; (1, 1) if the image is not divided into tiles."""
        side, fewest = self._side, int(self._setting("min_tiles", 2))
        most = self._max_tiles
        rounded = [max(self._patch, round(length / side) * side) for length in (width, height)]
        limit = int(self._setting("max_image_tokens", 256)) * side**2 * self._setting("max_pixels_tolerance", 2.0)
        if rounded[0] * rounded[1] <= limit or most < fewest:
            return 1, 1
        shapes = sorted(
            (
                (columns, rows)
                for columns in range(1, most + 1)
                for rows in range(1, most + 1)
                if fewest <= columns * rows <= most
            ),
            key=lambda shape: shape[0] * shape[1],
        )
        best, least_difference = (1, 1), math.inf
        for columns, rows in shapes:
            difference = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * self._tile**2 * columns * rows
            if difference < least_difference or (difference == least_difference and is_large):
                best, least_difference = (columns, rows), difference
        return best[1], best[0]

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        from PIL.Image import Resampling

        grid = self.grid(image.width, image.height)
        rows, columns, height, width = grid
        resample = Resampling(int(self._setting("resample", Resampling.BICUBIC)))
        views = []
        if rows * columns > 1:
            tile = self._tile
            whole = image.resize((columns * tile, rows * tile), resample)
            views = [
                whole.crop((x * tile, y * tile, (x + 1) * tile, (y + 1) * tile))
                for y in range(rows)
                for x in range(columns)
            ]
        if rows * columns == 1 or self._setting("use_thumbnail", True):
            views.append(image.resize((width * self._side, height * self._side), resample))
        return grid, self._packed(views)

    def _packed(self, views: list[Image.Image]) -> dict[str, np.ndarray]:
        """Return the encoder's inputs for views: the patches of each view, padded to the same number, and masks.

        The pixels have the shape [views, patches, patch size squared * 3].

        Args:
            views: tiles and thumbnail of an image, or the resized image.
        """
        patch = self._patch
        features = int(self._setting("max_image_tokens", 256)) * int(self._setting("downsample_factor", 2)) ** 2
        num_patches = features
        if self._setting("do_image_splitting", True):
            num_patches = max(features, (self._tile // patch) ** 2)
        pixels = np.zeros((len(views), num_patches, patch * patch * 3), np.uint8)
        mask = np.zeros((len(views), num_patches), np.int32)
        shapes = np.zeros((len(views), 2), np.int32)
        mean, std = (
            np.array(self.vision.processor.get(name, [0.5] * 3), np.float64) for name in ("image_mean", "image_std")
        )
        for i, view in enumerate(views):
            array = np.asarray(view)
            height, width = array.shape[0] // patch, array.shape[1] // patch
            patches = array.reshape(height, patch, width, patch, 3).swapaxes(1, 2).reshape(height * width, -1)
            pixels[i, : len(patches)], mask[i, : len(patches)], shapes[i] = patches, 1, (height, width)
        scale = self._setting("rescale_factor", 1 / 255) / std
        inputs = integer_pixels(pixels, scale, -mean / std, "channels within a pixel")
        return {**inputs, "pixel_attention_mask": mask, "spatial_shapes": shapes}

    def segments(self, grid: Grid) -> list[str | int]:
        rows, columns, height, width = grid
        if rows * columns == 1:
            return [_START, height * width, _END]
        segments: list[str | int] = []
        text = _START
        for row in range(rows):
            for column in range(columns):
                segments += [f"{text}<|img_row_{row + 1}_col_{column + 1}|>", self._tile_features]
                text = ""
        if self._setting("use_thumbnail", True):
            segments += [_THUMBNAIL, height * width]
        return [*segments, _END]
