"""Image encoders of checkpoints: supported architectures, their weights, and reasons to refuse images.

mlx-vlm implements the encoders. It is an optional dependency: ``pip install 'metal-engine[vision]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from metal_engine.prompt_images import BidirectionalLayers
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import TEXT_ONLY
from metal_engine.settings.speculative import speculative_config

# Architectures whose images are supported -> their modules in mlx_vlm.models.
ENCODERS = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "internvl_chat": "internvl_chat",
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
    "smolvlm": "smolvlm",
}
_OLDEST, _TOO_NEW = (0, 7, 10), (0, 8)
INSTALL = "pip install 'metal-engine[vision]'"


def image_refusal(config: Mapping[str, Any], args: EngineArgs) -> str | None:
    """Return the reason why a model with these settings accepts no images; None if it accepts images.

    Args:
        config: content of ``config.json``.
    """
    model_type = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict):
        return TEXT_ONLY
    if model_type not in ENCODERS:
        return f"the architecture {model_type} has no supported image encoder"
    if args.num_ranks > 1:
        return "several ranks take text only"
    speculative = speculative_config(args)
    if speculative is not None and speculative.method == "draft_model":
        return "the method draft_model of --speculative-config takes text only; use ngram or mtp"
    return _mlx_vlm_problem()


def bidirectional_layers(config: Mapping[str, Any]) -> BidirectionalLayers:
    """Return the layers in which all tokens of an image attend to each other, as the model's authors define it.

    The result is ``every layer``, ``layers with windows``, or "" for no layer.

    Args:
        config: content of ``config.json``.
    """
    if config.get("model_type") == "gemma3":
        return "every layer"
    text = config.get("text_config") or {}
    is_gemma4 = config.get("model_type") == "gemma4" and text.get("use_bidirectional_attention") == "vision"
    return "layers with windows" if is_gemma4 else ""


def feature_bytes(config: Mapping[str, Any], hidden_size: int, number_bytes: int) -> int:
    """Return the size of an image token's features in bytes: one embedding, and one more for each deepstack layer.

    Args:
        config: content of ``config.json`` of a model with an image encoder.
        hidden_size: number of elements of an embedding.
        number_bytes: size of an element in bytes.
    """
    num_deep_layers = len(config["vision_config"].get("deepstack_visual_indexes") or ())
    return hidden_size * number_bytes * (1 + num_deep_layers)


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
