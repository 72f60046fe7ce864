"""Adds the image encoder to a loaded model, or finds the reason why the model takes text only."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from metal_engine.checkpoints.image_encoders import feature_bytes, image_refusal
from metal_engine.checkpoints.image_processors import read_vision
from metal_engine.errors import ModelLoadError, one_line
from metal_engine.media.families.find import find_family
from metal_engine.settings.config import TEXT_ONLY
from metal_engine.settings.resolve import too_small_for_images

if TYPE_CHECKING:
    from pathlib import Path

    from metal_engine.attention.choice import ChosenAttention
    from metal_engine.checkpoints.loader import LoadedModel
    from metal_engine.checkpoints.requirements import CheckpointRequirements
    from metal_engine.loading.opened_model import OpenedModel
    from metal_engine.models.multimodal.encoder import ImageEncoder
    from metal_engine.settings.args import EngineArgs
    from metal_engine.settings.config import DeviceInfo, EngineConfig, ModelInfo, VisionConfig

logger = logging.getLogger(__name__)

# Width and height, in pixels, of an image that becomes the smallest possible number of tokens.
_SMALL_SIZE = (64, 64)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an encoder in bytes: all its weights, and the features of one image token."""

    weight_bytes: int
    feature_bytes: int


def warn_of_refusal(name: str, refusal: str) -> None:
    """Log why a model with an image encoder refuses images. Log nothing for text models (``TEXT_ONLY``)."""
    if refusal != TEXT_ONLY:
        logger.warning("%s serves text, and refuses images: %s", name, refusal)


def find_vision(
    args: EngineArgs, folder: Path, requirements: CheckpointRequirements, device: DeviceInfo
) -> VisionConfig | str:
    """Return a model's image processing configuration, or the reason to refuse images. Reads no weights.

    Args:
        folder: directory of the checkpoint, or a GGUF file.

    Raises:
        ConfigError: the settings conflict, or even the smallest image has more tokens than
            ``--max-num-encoder-tokens``.
    """
    from metal_engine.models.info import expected_model_info

    refusal = image_refusal(requirements.config, args)
    if refusal is not None:
        return refusal
    try:
        vision = read_vision(folder, json.loads(args.mm_processor_kwargs or "{}"))
        smallest = find_family(vision, 1)
        vision = replace(vision, least_image_tokens=smallest.num_tokens(smallest.grid(*_SMALL_SIZE)))
    except ModelLoadError as error:
        return f"its image processor cannot be used: {error}"
    except Exception as error:  # the checkpoint's configuration may have any content
        logger.debug("reading the image processor of %s", args.model, exc_info=error)
        return f"its image processor cannot be used: {type(error).__name__}: {one_line(error)}"
    info = expected_model_info(args.model, requirements, args.kv_cache_dtype) if vision.bidirectional_layers else None
    return too_small_for_images(args, vision, info, device) or vision


def add_image_input(
    args: EngineArgs, loaded: LoadedModel, opened: OpenedModel, vision: VisionConfig | str, *, is_checked: bool = False
) -> ModelInfo:
    """Load the image encoder of a model, and check that images reach the model correctly.

    Adds the encoder to ``opened.paged``. If the load or the check fails, the model serves text only, and the reason is
    logged.

    Args:
        vision: result of :func:`find_vision`. Nothing is loaded if the result is a reason to refuse images.
        is_checked: True if an earlier process has checked the same model.

    Returns:
        Facts about the model, with the encoder, or with the reason why images are refused.
    """
    if isinstance(vision, str):
        return replace(opened.info, image_refusal=vision)
    try:
        sizes = _load(args, loaded, opened, is_checked=is_checked)
    except Exception as error:
        opened.paged.images = None
        logger.debug("loading the image encoder of %s", loaded.name, exc_info=error)
        refusal = f"its image encoder does not work here ({type(error).__name__}: {one_line(error)})"
        warn_of_refusal(loaded.name, refusal)
        return replace(opened.info, image_refusal=refusal)
    return replace(
        opened.info,
        image_refusal=None,
        vision=vision,
        weight_bytes=opened.info.weight_bytes + sizes.weight_bytes,
        feature_bytes=sizes.feature_bytes,
    )


def with_largest_image(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the number of tokens of the largest image filled in.

    Returns ``config`` itself if the model does not take images.
    """
    vision = config.vision
    if vision is None:
        return config
    most = find_family(vision, vision.max_image_tokens).most_tokens
    assert config.model.vision is not None
    own = replace(config.model.vision, most_image_tokens=most)
    return replace(config, model=replace(config.model, vision=own))


def _load(args: EngineArgs, loaded: LoadedModel, opened: OpenedModel, *, is_checked: bool) -> _Sizes:
    import mlx.core as mx

    from metal_engine.checkpoints.loader import DTYPES
    from metal_engine.checkpoints.metadata import read_config
    from metal_engine.device.info import computes_on_cpu
    from metal_engine.models.multimodal.check import check_images
    from metal_engine.models.multimodal.loading import load_encoder_weights
    from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder

    config = read_config(loaded.path)  # mlx-lm changes its configuration when it creates the model
    on_cpu = computes_on_cpu()
    dtype = DTYPES.get(args.dtype, mx.float32 if on_cpu else None)
    paged, hidden_size = opened.paged, opened.info.hidden_size
    encoder = MlxVlmEncoder(config, hidden_size, paged.dtype)
    language_model = encoder.take_language_model()
    weight_bytes = load_encoder_weights(encoder, loaded.path, loaded.config, dtype, on_cpu=on_cpu)
    paged.add_image_encoder(encoder)
    if not is_checked:
        logger.info("checking that images reach %s correctly", loaded.name)
        check_images(paged, encoder, language_model)
        _try_kernel(opened.attention, encoder, args.block_size)
    return _Sizes(weight_bytes, feature_bytes(config, hidden_size, paged.dtype.size))


def _try_kernel(attention: ChosenAttention, encoder: ImageEncoder, block_size: int) -> None:
    """Try the Metal kernel with images whose tokens attend to each other. Raises KernelFailedError if it fails."""
    from metal_engine.attention.kernel_selftest import try_images

    if not encoder.bidirectional_layers or attention.metal is None:
        return
    for kind in dict.fromkeys(attention.kinds):
        if kind not in attention.not_covered and (kind.has_window or encoder.bidirectional_layers == "every layer"):
            try_images(attention.metal, kind, block_size)
