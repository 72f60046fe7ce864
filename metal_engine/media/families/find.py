"""Finds the image processing of a model."""

from __future__ import annotations

from metal_engine.media.families.base import ImageFamily
from metal_engine.media.families.qwen_vl import QwenVL
from metal_engine.settings.config import VisionConfig

_FAMILIES: dict[str, type[ImageFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QwenVL)
}
FAMILIES = frozenset(_FAMILIES)
"""Names of the families whose images can be processed: values of ``model_type`` in a checkpoint's ``config.json``."""


def find_family(vision: VisionConfig, max_tokens: int | None) -> ImageFamily:
    """Return the image processing of a model. ``vision.family`` is in :data:`FAMILIES`."""
    return _FAMILIES[vision.family](vision, max_tokens)
