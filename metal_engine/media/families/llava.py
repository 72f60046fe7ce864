"""LLaVA: one square crop of the image, and a feature for each of its patches."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from metal_engine.media.families.base import Grid, ImageFamily

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


class Llava(ImageFamily):
    """The grid has the number of features. All images have the same number."""

    @cached_property
    def _processor(self) -> Any:
        if self.vision.processor.get("image_processor_type", "").startswith("Llava"):
            from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil as Processor
        elif self.vision.processor.get("image_processor_type", "").startswith("Siglip"):
            from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil as Processor
        else:
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Processor
        return Processor.from_dict(self._settings())

    def grid(self, width: int, height: int) -> Grid:
        return (self.vision.num_features,)

    def inputs(self, image: Image.Image) -> tuple[Grid, dict[str, np.ndarray]]:
        found = self._processor(images=[image], return_tensors="np")
        return (self.vision.num_features,), {"pixel_values": found["pixel_values"].astype("float32", copy=False)}

    def segments(self, grid: Grid) -> list[str | int]:
        return [grid[0]]
