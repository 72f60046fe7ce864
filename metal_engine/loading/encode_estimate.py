"""Estimates the memory for encoding a model's largest image before the model is loaded, to make room for the model.

After the load, the memory is measured (:mod:`metal_engine.runner.encode_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from metal_engine.runner.encode_memory import CPU_TOKENS
from metal_engine.settings.config import DeviceInfo

# The peak memory is about the sum of these float32 arrays:
# - _LAYER_ARRAYS arrays of the size of all patches' queries, keys, values, feed-forward activations and pixels
# - on a CPU, _SCORE_ARRAYS arrays of the size of an image's attention scores
_LAYER_ARRAYS = 6
_SCORE_ARRAYS = 2
_NUMBER_BYTES = 4
# Configuration fields with the side, in patches, of the square of patches that becomes one image token.
_MERGES = ("spatial_merge_size", "scale_factor", "downsample_factor", "merge_kernel_size")


def estimate_encode_bytes(config: Mapping[str, Any], device: DeviceInfo, num_tokens: int) -> int:
    """Return an estimate of the memory for encoding an image of ``num_tokens`` tokens, in bytes.

    Args:
        config: content of ``config.json`` of a model with an image encoder.
        device: device on which the encoder will run.
    """
    vision = config["vision_config"]
    hidden = int(vision.get("embed_dim") or vision.get("hidden_size") or 0)
    width = 3 * hidden + int(vision.get("intermediate_size") or 4 * hidden)
    pixels = 3 * int(vision.get("temporal_patch_size", 1)) * _side(vision.get("patch_size", 14)) ** 2
    per_token = _patches_per_token(config, vision)
    numbers = _LAYER_ARRAYS * num_tokens * per_token * (width + pixels)
    if device.kind == "cpu":  # the memory of larger images is extrapolated
        measured = min(num_tokens, CPU_TOKENS)
        num_heads = int(vision.get("num_heads") or vision.get("num_attention_heads") or 1)
        numbers += _SCORE_ARRAYS * num_heads * (measured * per_token) ** 2 * ceil(num_tokens / measured)
    return _NUMBER_BYTES * numbers


def _patches_per_token(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    if ratio := config.get("downsample_ratio"):
        return round(1 / float(ratio) ** 2)
    default = 1 if config["model_type"] in ("llava", "pixtral") else 2
    found = (section[name] for section in (config, vision) for name in _MERGES if section.get(name))
    return _side(next(found, default)) ** 2


def _side(size: Any) -> int:
    """Return the height of a size: a number, a list [height, ...], or a dict with ``height``."""
    if isinstance(size, dict):
        size = size["height"]
    return int(size[0] if isinstance(size, list) else size)
