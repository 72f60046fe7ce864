"""Reads the weights of image encoders, which mlx-lm leaves out of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metal_engine.checkpoints.dequantized import dequantize
from metal_engine.checkpoints.file_checks import visible_files
from metal_engine.checkpoints.loader import read_weights
from metal_engine.checkpoints.metadata import is_vision_tensor
from metal_engine.models.multimodal.mlx_vlm_encoder import MlxVlmEncoder


def load_encoder_weights(
    encoder: MlxVlmEncoder, folder: Path, config: dict[str, Any], dtype: mx.Dtype | None, *, on_cpu: bool
) -> int:
    """Read the weights of an encoder, and return their size in bytes.

    Args:
        encoder: encoder without its language model (:meth:`MlxVlmEncoder.take_language_model`).
        folder: directory of the checkpoint. All its safetensors files may have weights of the encoder.
        config: configuration of the checkpoint, with the bits of quantized weights.
        dtype: type to which floating-point weights are converted; None to keep the stored type.
        on_cpu: True to dequantize the weights. False to keep quantized weights quantized.

    Raises:
        ValueError: the checkpoint has no weights of an encoder, or they do not fit the encoder.
    """
    stored = _stored_weights(folder)
    if not stored:
        raise ValueError("the checkpoint has no weights of an image encoder")
    model = encoder.model
    weights = stored
    for module in (model, *(model[name] for name in ("vision_tower", "vision_model") if name in model)):
        if hasattr(module, "sanitize"):  # renames weights, and changes their layout
            weights = module.sanitize(weights)
    if quantization := config.get("quantization") or config.get("quantization_config"):
        _quantize(model, quantization, weights)
    model.load_weights(list(weights.items()))
    if on_cpu:
        dequantize(model)
    if dtype is not None:
        model.set_dtype(dtype)
    model.eval()
    read_weights(model)
    return sum(array.nbytes for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def _stored_weights(folder: Path) -> dict[str, mx.array]:
    """Return the weights of the image encoder in a checkpoint, not read yet, by their stored names."""
    found: dict[str, mx.array] = {}
    for path in visible_files(folder, "*.safetensors"):
        if path.name.startswith("consolidated"):  # a second copy of the checkpoint with other names
            continue
        arrays = cast(dict[str, mx.array], mx.load(str(path)))
        found |= {name: array for name, array in arrays.items() if is_vision_tensor(name)}
    return found


def _quantize(model: nn.Module, quantization: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Replace each layer of a model by a quantized layer if its stored weights are quantized.

    Args:
        model: model of mlx-vlm, changed in place.
        quantization: quantization in the checkpoint's configuration: defaults, and settings of single layers by name.
        weights: stored weights by name.
    """
    names = ("group_size", "bits", "mode")
    defaults: dict[str, Any] = {name: quantization[name] for name in names if name in quantization}

    def settings(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        own = quantization.get(path)
        return own if isinstance(own, dict) else defaults

    nn.quantize(model, class_predicate=settings)
