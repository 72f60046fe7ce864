"""Image encoders of checkpoints: supported architectures, their weights, and reasons to refuse images.

mlx-vlm implements the encoders. It is an optional dependency: ``pip install 'metal-engine[vision]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from metal_engine.images import SeesItself
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import TEXT_ONLY
from metal_engine.settings.speculative import speculative_config

# Architectures whose images are supported -> their modules in mlx_vlm.models.
ENCODERS = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "kimi_vl": "kimi_vl",
    "lfm2-vl": "lfm2_vl",
    "lfm2_vl": "lfm2_vl",
    "llava": "llava",
    "mistral3": "mistral3",
    "pixtral": "pixtral",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
}
_OLDEST, _TOO_NEW = (0, 7, 10), (0, 8)
INSTALL = "pip install 'metal-engine[vision]'"


def image_refusal(config: Mapping[str, Any], args: EngineArgs) -> str | None:
    """Return the reason to refuse images for a model and settings, before the weights are read. None: accept images.

    Args:
        config: content of ``config.json``.
    """
    model_type = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict):
        return TEXT_ONLY
    if model_type not in ENCODERS:
        return f"images of the architecture {model_type} are not supported"
    if args.num_ranks > 1:
        return "images are not supported on several ranks"
    if args.kv_cache_dir is not None or args.kv_transfer_config is not None:
        return "images are not supported with a store of KV (--kv-cache-dir, --kv-transfer-config)"
    speculative = speculative_config(args)
    if speculative is not None and speculative.method != "ngram":
        return "images are supported only with the method ngram of --speculative-config"
    return _mlx_vlm_problem()


def sees_itself(config: Mapping[str, Any]) -> SeesItself:
    """Return the layers in which the tokens of an image attend to each other by the published definition.

    Args:
        config: content of ``config.json``.
    """
    if config.get("model_type") == "gemma3":
        return "every layer"
    text = config.get("text_config") or {}
    is_gemma4 = config.get("model_type") == "gemma4" and text.get("use_bidirectional_attention") == "vision"
    return "layers with windows" if is_gemma4 else ""


def _mlx_vlm_problem() -> str | None:
    try:
        found = version("mlx-vlm")
        version("pillow")
    except PackageNotFoundError as error:
        return f"{error.name} is not installed: {INSTALL}"
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if _OLDEST <= numbers < _TOO_NEW:
        return None
    return f"mlx-vlm {found} is not supported: {INSTALL}"
