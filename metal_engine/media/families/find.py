"""Finds the image processing of a model."""

from __future__ import annotations

from metal_engine.media.families.base import ImageProcessorFamily
from metal_engine.media.families.gemma3 import Gemma3
from metal_engine.media.families.gemma4 import Gemma4
from metal_engine.media.families.idefics3 import Idefics3
from metal_engine.media.families.internvl import InternVL
from metal_engine.media.families.kimi_vl import KimiVL
from metal_engine.media.families.lfm2_vl import Lfm2VL
from metal_engine.media.families.llava import Llava
from metal_engine.media.families.pixtral import Pixtral
from metal_engine.media.families.qwen_vl import QwenVL
from metal_engine.settings.config import VisionConfig

_FAMILIES: dict[str, type[ImageProcessorFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QwenVL),
    **dict.fromkeys(("pixtral", "mistral3"), Pixtral),
    **dict.fromkeys(("idefics3", "smolvlm"), Idefics3),
    **dict.fromkeys(("internvl", "internvl_chat"), InternVL),
    **dict.fromkeys(("lfm2-vl", "lfm2_vl"), Lfm2VL),
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "llava": Llava,
    "kimi_vl": KimiVL,
}
FAMILIES = frozenset(_FAMILIES)
"""Values of :attr:`VisionConfig.family` that are supported."""


def find_family(vision: VisionConfig, max_tokens: int | None) -> ImageProcessorFamily:
    """Return the image processing of a model.

    Args:
        vision: configuration whose ``family`` is in :data:`FAMILIES`.
        max_tokens: maximum number of an image's tokens, as for :class:`ImageProcessorFamily`.
    """
    return _FAMILIES[vision.family](vision, max_tokens)
