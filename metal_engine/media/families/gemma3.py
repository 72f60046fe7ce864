"""Gemma 3: the image as one square, and a constant number of features between two marks."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from metal_engine.media.families.base import Grid, ImageFamily

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


class Gemma3(ImageFamily):
    """The grid has the number of features. All images have the same number."""

    joins_newlines = True

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil.from_dict(self._settings())

    def grid(self, width: int, height: int) -> Grid:
        return (self.vision.num_features,)

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        found = self._processor(images=[image], return_tensors="np")
        return (self.vision.num_features,), {"pixel_values": found["pixel_values"].astype("float32", copy=False)}

    def segments(self, grid: Grid) -> list[str | int]:
        return ["\n\n<start_of_image>", grid[0], "<end_of_image>\n\n"]
