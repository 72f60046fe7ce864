"""Families of image encoders in mlx-vlm: their axes, and inputs for a check and for a measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.models.multimodal.encoder import Axes, SampleImage

# Makes an image of about rows * columns features. Arguments: configuration of mlx-vlm's model, rows, columns.
MakeSample = Callable[[Any, int, int], SampleImage]
# Computes features. Arguments: mlx-vlm's model, pixels, other inputs by name.
ComputeFeatures = Callable[[Any, mx.array, Mapping[str, mx.array]], mx.array]


@dataclass(frozen=True)
class EncoderFamily:
    """Encoders that take the same inputs.

    Attributes:
        sample: makes a random image.
        sections: number of rotary frequencies of each axis (M-RoPE), if a model's configuration does not have it. None
            if positions have one axis.
        interleaved: True if the axes alternate (:class:`Axes`).
        features: function that computes the features of an image, [1, F, hidden_size], and evaluates nothing. None to
            use mlx-vlm's method, which merges features into embeddings.
    """

    sample: MakeSample
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False
    features: ComputeFeatures | None = None

    def axes(self, config: Mapping[str, Any]) -> Axes | None:
        """Return the axes of a model's rotary embedding; None if the embedding has one axis.

        Args:
            config: content of ``config.json``.
        """
        if self.sections is None:
            return None
        text = config.get("text_config") or config
        for name in ("rope_parameters", "rope_scaling"):
            sections = (text.get(name) or {}).get("mrope_section")
            if sections:
                return Axes(tuple(sections), self.interleaved)
        return Axes(self.sections, self.interleaved)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _qwen(config: Any, rows: int, columns: int) -> SampleImage:
    vision = config.vision_config
    height, width = rows * vision.spatial_merge_size, columns * vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    pixels = _random(height * width, channels * vision.temporal_patch_size * vision.patch_size**2)
    grid = np.array([[1, height, width]], np.int32)
    return SampleImage({"pixel_values": pixels, "image_grid_thw": grid}, rows * columns)


def _pixtral(config: Any, rows: int, columns: int) -> SampleImage:
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    height, width = rows * side, columns * side
    sizes = np.array([[height, width]], np.int32)
    return SampleImage({"pixel_values": _random(1, 3, height, width), "image_sizes": sizes}, rows * columns)


def _llava(config: Any, rows: int, columns: int) -> SampleImage:
    """Make an image of the encoder's only size. ``rows`` and ``columns`` have no effect."""
    vision = config.vision_config
    num_features = (vision.image_size // vision.patch_size) ** 2
    if config.vision_feature_select_strategy == "full":
        num_features += 1  # with the class token
    return SampleImage({"pixel_values": _random(1, 3, vision.image_size, vision.image_size)}, num_features)


def _lfm2(config: Any, rows: int, columns: int) -> SampleImage:
    vision, factor = config.vision_config, config.downsample_factor
    height, width = rows * factor, columns * factor
    inputs = {
        "pixel_values": _random(1, height * width, 3 * vision.patch_size**2),
        "spatial_shapes": np.array([[height, width]], np.int32),
        "pixel_attention_mask": np.ones((1, height * width), np.int32),
    }
    return SampleImage(inputs, rows * columns)


def _kimi(config: Any, rows: int, columns: int) -> SampleImage:
    vision = config.vision_config
    merge = vision.merge_kernel_size
    height, width = rows * merge[0], columns * merge[1]
    inputs = {
        "pixel_values": _random(height * width, 3, vision.patch_size, vision.patch_size),
        "image_grid_hws": np.array([[height, width]], np.int32),
    }
    return SampleImage(inputs, rows * columns)


def _gemma3(config: Any, rows: int, columns: int) -> SampleImage:
    """Make an image of the encoder's only size. ``rows`` and ``columns`` have no effect."""
    side = config.vision_config.image_size
    return SampleImage({"pixel_values": _random(1, 3, side, side)}, config.text_config.mm_tokens_per_image)


def _gemma3_features(model: Any, pixels: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """Compute features without mlx-vlm's method, which converts a mask to NumPy.

    The conversion would evaluate an array, and therefore wait for the running step.
    """
    projector = model.multi_modal_projector
    pixels = pixels.transpose(0, 2, 3, 1).astype(projector.mm_input_projection_weight.dtype)
    hidden, *_ = model.vision_tower(pixels, output_hidden_states=True)
    features: mx.array = projector(hidden)
    return features


def _gemma4(config: Any, rows: int, columns: int) -> SampleImage:
    vision = config.vision_config
    side = vision.pooling_kernel_size
    y, x = np.indices((rows * side, columns * side), np.int32).reshape(2, -1)
    positions = np.stack([x, y], axis=-1)[None]
    pixels = _random(1, positions.shape[1], 3 * vision.patch_size**2)
    return SampleImage({"pixel_values": pixels, "image_position_ids": positions}, rows * columns)


def _gemma4_features(model: Any, pixels: mx.array, inputs: Mapping[str, mx.array]) -> mx.array:
    """Compute features without mlx-vlm's method, which counts the features that are not padding.

    Counting would evaluate an array, and therefore wait for the running step. mlx-vlm's method also multiplies one-hot
    positions with the table of position embeddings, which takes 200 MB for an image of 280 tokens. The image must have
    no padding.
    """
    tower, positions = model.vision_tower, inputs["image_position_ids"]  # x and y of each patch
    is_padding = mx.zeros(positions.shape[:2], mx.bool_)
    table = tower.patch_embedder.position_embedding_table
    patches = tower.patch_embedder.input_proj((2 * (pixels - 0.5)).astype(table.dtype))
    hidden = patches + (table[0][positions[..., 0]] + table[1][positions[..., 1]])
    hidden = tower.encoder(hidden, positions, None)
    num_features = positions.shape[1] // tower.pooling_kernel_size**2
    pooled, _ = tower.pooler(hidden, positions, is_padding, output_length=num_features)
    if tower.config.standardize:
        pooled = (pooled - tower.std_bias) * tower.std_scale
    features: mx.array = model.embed_vision(pooled)
    return features


def _idefics3(config: Any, rows: int, columns: int) -> SampleImage:
    """Make an image of whole tiles. Each tile has a constant number of features."""
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    features = (side // patch // config.scale_factor) ** 2
    tiles = max(1, rows * columns // features)
    inputs = {
        "pixel_values": _random(1, tiles, 3, side, side),
        "pixel_attention_mask": np.ones((1, tiles, side, side), np.int32),
    }
    return SampleImage(inputs, tiles * features)


def _internvl(config: Any, rows: int, columns: int) -> SampleImage:
    """Make an image of whole tiles. Each tile has a constant number of features."""
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    features = int(side // patch * config.downsample_ratio) ** 2
    tiles = max(1, rows * columns // features)
    return SampleImage({"pixel_values": _random(tiles, 3, side, side)}, tiles * features)


_QWEN2 = EncoderFamily(_qwen, (16, 24, 24))
_QWEN3_VL = EncoderFamily(_qwen, (24, 20, 20), interleaved=True)
_QWEN3_5 = EncoderFamily(_qwen, (11, 11, 10), interleaved=True)

# Family of each supported module of mlx_vlm.models.
FAMILIES = {
    "gemma3": EncoderFamily(_gemma3, features=_gemma3_features),
    "gemma4": EncoderFamily(_gemma4, features=_gemma4_features),
    "idefics3": EncoderFamily(_idefics3),
    "internvl": EncoderFamily(_internvl),
    "internvl_chat": EncoderFamily(_internvl),
    "kimi_vl": EncoderFamily(_kimi),
    "lfm2_vl": EncoderFamily(_lfm2),
    "llava": EncoderFamily(_llava),
    "mistral3": EncoderFamily(_pixtral),
    "pixtral": EncoderFamily(_pixtral),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "smolvlm": EncoderFamily(_idefics3),
}
