"""Idefics 3 and SmolVLM: tiles of the resized image, row by row, and then the whole image."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from metal_engine.media.families.base import AS_INTEGERS, Grid, ImageProcessorFamily, integer_pixels, scaled_by

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

_FRAME, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(ImageProcessorFamily):
    """Image processing of Idefics 3 and SmolVLM.

    The grid has the numbers of rows and columns of tiles; (0, 0) for an image of one tile.
    """

    @cached_property
    def _processor(self) -> Any:
        if self.vision.family == "smolvlm":
            from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as Processor
        else:
            from transformers.models.idefics3.image_processing_pil_idefics3 import (
                Idefics3ImageProcessorPil as Processor,
            )

        processor = Processor.from_dict(self._settings())
        if self.max_tokens is not None:
            tile = processor.max_image_size["longest_edge"]
            side = processor.size["longest_edge"] // tile
            while side > 1 and (side * side + 1) * self.vision.num_features > self.max_tokens:
                side -= 1
            processor.size = {"longest_edge": min(processor.size["longest_edge"], side * tile)}
        return processor

    @property
    def most_tokens(self) -> int:
        processor, num_features = self._processor, self.vision.num_features
        side = -(-processor.size["longest_edge"] // processor.max_image_size["longest_edge"])
        is_tiled = processor.do_image_splitting and side > 1
        return int(side * side + 1) * num_features if is_tiled else num_features

    def grid(self, width: int, height: int) -> Grid:
        _, rows, columns = self._processor.get_number_of_image_patches(height, width, {})
        return rows, columns

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        found = self._processor(images=[[image]], return_row_col_info=True, **AS_INTEGERS)
        grid = int(found["rows"][0][0]), int(found["cols"][0][0])
        inputs = integer_pixels(found["pixel_values"], *scaled_by(self._processor), "channels, height, width")
        return grid, {**inputs, "pixel_attention_mask": found["pixel_attention_mask"].astype("bool")}

    def segments(self, grid: Grid) -> list[str | int]:
        rows, columns = grid
        num_features = self.vision.num_features
        segments: list[str | int] = []
        text = ""
        for row in range(rows):
            for column in range(columns):
                text += f"{_FRAME}<row_{row + 1}_col_{column + 1}>"
                segments += [text, num_features]
                text = ""
            text = "\n"
        return [*segments, f"{text}{text and chr(10)}{_FRAME}{_WHOLE}", num_features, _FRAME]
