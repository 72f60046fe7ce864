"""Reads the configuration of a checkpoint's image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metal_engine.checkpoints.file_checks import read_json
from metal_engine.checkpoints.image_encoders import bidirectional_layers
from metal_engine.errors import ModelLoadError
from metal_engine.settings.config import VisionConfig

# Default maximum number of a prompt's tokens for an image. With patches of 16 pixels that are merged 2 x 2, an image of
# 1.3 megapixels has 1,280 tokens.
MAX_IMAGE_TOKENS = 1280
# Fields of the configuration that have the id of the image token.
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
# Settings of LFM2-VL that conversions for MLX turn off, because their first processor had no tiles.
_TILES = ("do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail")


def read_vision(folder: Path, overrides: dict[str, Any]) -> VisionConfig:
    """Return the image processing settings of a checkpoint with an image encoder.

    Args:
        folder: directory of the checkpoint.
        overrides: fields of ``--mm-processor-kwargs``, which replace fields of the checkpoint. If there are any, images
            are not limited to ``MAX_IMAGE_TOKENS``.

    Raises:
        ModelLoadError: a file or the image token is missing, or a setting of the image processor is not supported.
        KeyError, TypeError, ValueError: another field is missing or invalid.
    """
    config = read_json(folder / "config.json")
    family, vision = str(config.get("model_type")), config.get("vision_config") or {}
    if family == "llava" and vision.get("model_type") == "pixtral":
        family = "pixtral"
    token_id = next((config[name] for name in _IMAGE_TOKENS if config.get(name) is not None), None)
    if token_id is None and family == "internvl_chat":
        token_id = _internvl_token(folder)
    if token_id is None:
        raise ModelLoadError("config.json has no image_token_id")
    processor = _internvl_processor(config, vision) if family == "internvl_chat" else _processor(folder)
    if family in ("lfm2_vl", "lfm2-vl"):
        processor = {name: value for name, value in processor.items() if name not in _TILES}
    if family == "internvl":  # the default of the model's processor, which its image processor lacks
        processor["crop_to_patches"] = True
    processor |= overrides
    if processor.get("do_pan_and_scan"):
        raise ModelLoadError("crops of an image (do_pan_and_scan) are not supported")
    max_tokens = None if overrides else MAX_IMAGE_TOKENS
    if family == "gemma4":
        max_tokens = int(processor.get("max_soft_tokens", 280))
    patch = vision.get("patch_size", processor.get("patch_size", 14))
    patch = patch[0] if isinstance(patch, list) else patch
    return VisionConfig(
        family=family,
        image_token_id=int(token_id),
        placeholder_token_id=int(config.get("boi_token_index", 255999)) if family == "gemma3" else None,
        processor=processor,
        patch_size=patch if isinstance(patch, int) else int(patch["height"]),
        merge_size=_merge_size(family, config, vision, processor),
        num_features=_num_features(family, config, vision),
        max_image_tokens=max_tokens,
        bidirectional_layers=bidirectional_layers(config),
    )


def _processor(folder: Path) -> dict[str, Any]:
    """Return the fields of the image processor in ``preprocessor_config.json`` and ``processor_config.json``.

    If both files have a field, ``processor_config.json`` decides.

    Raises:
        ModelLoadError: neither file has fields, or a file is invalid.
    """
    found: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            own = content.get("image_processor")
            if isinstance(own, dict):
                found |= own
            elif name == "preprocessor_config.json":
                found |= content
    if not found:
        raise ModelLoadError("preprocessor_config.json is missing")
    return found


def _internvl_processor(config: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the image processor of an ``internvl_chat`` model, from its ``config.json``.

    The file lacks the mean and the standard deviation of pixels. The result has ImageNet's values.
    """
    side = int(config.get("force_image_size") or vision.get("image_size", 448))
    return {
        "size": {"height": side, "width": side},
        "crop_to_patches": config.get("dynamic_image_size", True),
        "min_patches": config.get("min_dynamic_patch", 1),
        "max_patches": config.get("max_dynamic_patch", 12),
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


def _internvl_token(folder: Path) -> int | None:
    """Return the id of InternVL's image token in the files of the tokenizer; None if it is missing."""
    for name in ("tokenizer_config.json", "added_tokens.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            ids = {token["content"]: int(key) for key, token in content.get("added_tokens_decoder", {}).items()}
            found = ids.get("<IMG_CONTEXT>", content.get("<IMG_CONTEXT>"))
            if found is not None:
                return int(found)
    return None


def _merge_size(family: str, config: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any]) -> int:
    if family == "mistral3":
        return int(config.get("spatial_merge_size", 2))
    if family == "kimi_vl":
        return int((vision.get("merge_kernel_size") or processor.get("merge_kernel_size") or [2])[0])
    if family == "pixtral":
        return 1
    return int(vision.get("spatial_merge_size") or processor.get("merge_size") or 1)


def _num_features(family: str, config: dict[str, Any], vision: dict[str, Any]) -> int:
    """Return the constant number of features of an image or a tile; 0 if the number varies."""
    if family == "llava":
        patches = int(vision["image_size"]) // int(vision["patch_size"])
        # The feature of the class token is dropped by default.
        return patches**2 + (config.get("vision_feature_select_strategy", "default") == "full")
    if family in ("idefics3", "smolvlm"):
        patches = int(vision["image_size"]) // int(vision["patch_size"])
        return patches**2 // int(config.get("scale_factor", 2)) ** 2
    if family == "gemma3":
        return int(config.get("mm_tokens_per_image", 256))
    if family in ("internvl", "internvl_chat"):
        side, patch = (
            size[0] if isinstance(size, list) else size for size in (vision["image_size"], vision["patch_size"])
        )
        return int(int(side) // int(patch) * float(config.get("downsample_ratio", 0.5))) ** 2
    return 0
