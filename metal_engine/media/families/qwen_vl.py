"""Qwen2-VL to Qwen3.5: patches of the resized image, merged 2 x 2, with positions on three axes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from metal_engine.media.families.base import AS_INTEGERS, Grid, ImageProcessorFamily, integer_pixels, scaled_by

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


class QwenVL(ImageProcessorFamily):
    """Image processing of Qwen2-VL to Qwen3.5. The grid has the numbers of patches in time, height and width."""

    has_axes = True

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_dict(self._settings())
        if self.max_tokens is not None:
            factor = processor.patch_size * processor.merge_size
            size = dict(processor.size)
            size["longest_edge"] = min(size["longest_edge"], self.max_tokens * factor**2)
            size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
            processor.size = size
        return processor

    @property
    def most_tokens(self) -> int:
        processor = self._processor
        return int(processor.size["longest_edge"] // (processor.patch_size * processor.merge_size) ** 2)

    def grid(self, width: int, height: int) -> Grid:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self._processor
        factor = processor.patch_size * processor.merge_size
        size = processor.size
        sides = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        return (1, sides[0] // processor.patch_size, sides[1] // processor.patch_size)

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        found = self._processor(images=[image], **AS_INTEGERS)
        grid = found["image_grid_thw"].astype("int32")
        inputs = integer_pixels(found["pixel_values"], *scaled_by(self._processor), "channels within a patch")
        return tuple(map(int, grid[0])), {**inputs, "image_grid_thw": grid}

    def segments(self, grid: Grid) -> list[str | int]:
        time, height, width = self.axes(grid)
        return [time * height * width]

    def axes(self, grid: Grid) -> tuple[int, int, int]:
        time, height, width = grid
        merge = self.vision.merge_size
        return time, height // merge, width // merge
