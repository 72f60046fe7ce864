"""Gemma 3: the image as one square, and a constant number of features between two marks."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from metal_engine.media.families.base import EqualImages, Grid


class Gemma3(EqualImages):
    """Image processing of Gemma 3."""

    joins_newlines = True

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil.from_dict(self._settings())

    def segments(self, grid: Grid) -> list[str | int]:
        return ["\n\n<start_of_image>", grid[0], "<end_of_image>\n\n"]
