"""InternVL: tiles of the resized image, and then the whole image as one more tile."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from metal_engine.media.families.base import AS_INTEGERS, Grid, ImageProcessorFamily, integer_pixels, scaled_by

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


class InternVL(ImageProcessorFamily):
    """Image processing of InternVL. The grid is the number of tiles, including the tile of the whole image."""

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        processor = GotOcr2ImageProcessorPil.from_dict(self._settings())
        if self.max_tokens is not None:
            most = self.max_tokens // self.vision.num_features - 1  # without the tile of the whole image
            processor.max_patches = max(1, min(processor.max_patches, most))
            processor.min_patches = min(processor.min_patches, processor.max_patches)
        return processor

    @property
    def most_tokens(self) -> int:
        processor = self._processor
        num_tiles = processor.max_patches if processor.crop_to_patches else 1
        return int(num_tiles + (num_tiles > 1)) * self.vision.num_features

    def grid(self, width: int, height: int) -> Grid:
        return (self._processor.get_number_of_image_patches(height, width, {}),)

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        found = self._processor(images=[image], **AS_INTEGERS)
        inputs = integer_pixels(found["pixel_values"], *scaled_by(self._processor), "channels, height, width")
        return (int(found["num_patches"][0]),), inputs

    def segments(self, grid: Grid) -> list[str | int]:
        return ["<img>", grid[0] * self.vision.num_features, "</img>"]
