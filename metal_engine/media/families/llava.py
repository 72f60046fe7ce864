"""LLaVA: one square crop of the image, and a feature for each of its patches."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from metal_engine.media.families.base import EqualImages, Grid


class Llava(EqualImages):
    """Image processing of LLaVA."""

    @cached_property
    def _processor(self) -> Any:
        if self.vision.processor.get("image_processor_type", "").startswith("Llava"):
            from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil as Processor
        elif self.vision.processor.get("image_processor_type", "").startswith("Siglip"):
            from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil as Processor
        else:
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Processor
        return Processor.from_dict(self._settings())

    def segments(self, grid: Grid) -> list[str | int]:
        return [grid[0]]
