"""Quantized weights of draft heads, in MLX's formats or in FP8 with one scale per block.

Weights in MLX's formats stay quantized. FP8 weights become bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from metal_engine.checkpoints.draft_heads.names import FP8_SCALES
from metal_engine.errors import ModelLoadError, short

# Rows and columns of a block of FP8 weights with one scale, if the configuration names no other size.
_FP8_BLOCK = [128, 128]
# Bits and group sizes of MLX's affine mode. MLX ends the process on a group size of zero.
_BITS, _GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
# MLX's other modes by bits and group size. Their scales are bytes.
_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


def without_fp8(arrays: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return the arrays with FP8 weights multiplied by their scales and converted to bfloat16, and without the scales.

    Args:
        arrays: arrays by published name.
        config: content of the ``config.json`` beside the arrays' files.

    Raises:
        ModelLoadError: the weights of some scales are missing or do not fit the scales, or the configuration's size of
            blocks is invalid.
    """
    quantization = config.get("quantization_config")
    named = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    block = _FP8_BLOCK if named is None else named
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ModelLoadError(f"config.json: weight_block_size must be two sizes, not {short(block)}")
    found = {name: array for name, array in arrays.items() if not name.endswith(FP8_SCALES)}
    for name in arrays.keys() - found.keys():
        weight = name.removesuffix(FP8_SCALES)
        if weight not in found:
            raise ModelLoadError(f"it has {name} without the weight")
        found[weight] = _from_fp8(weight, found[weight], arrays[name], *block)
    return found


def _from_fp8(name: str, weight: mx.array, scales: mx.array, num_rows: int, num_columns: int) -> mx.array:
    """Convert FP8 weights in E4M3 to bfloat16.

    Args:
        name: name of the weights in errors.
        weight: E4M3 codes as uint8, [..., m, n].
        scales: scale of each block, [..., ceil(m / num_rows), ceil(n / num_columns)].
        num_rows: number of rows of a block.
        num_columns: number of columns of a block.

    Returns:
        The weights, [..., m, n] bfloat16.

    Raises:
        ModelLoadError: the weights are not FP8, or the scales have another shape.
    """
    if weight.dtype != mx.uint8 or weight.ndim < 2:
        raise ModelLoadError(f"its {name} has scales of FP8 numbers, but is not a matrix in FP8")
    *lead, m, n = weight.shape
    padding = [(0, 0)] * len(lead) + [(0, -m % num_rows), (0, -n % num_columns)]
    values = mx.pad(mx.from_fp8(weight, mx.bfloat16), padding)
    num_blocks = [values.shape[-2] // num_rows, values.shape[-1] // num_columns]
    if scales.shape != (*lead, *num_blocks):
        raise ModelLoadError(f"its {name} is not quantized in FP8 by blocks of {num_rows} x {num_columns}")
    blocks = values.reshape(*lead, num_blocks[0], num_rows, num_blocks[1], num_columns)
    blocks = (blocks * scales[..., :, None, :, None]).astype(mx.bfloat16)
    return blocks.reshape(values.shape)[..., :m, :n]


def mlx_quantization(path: str, module: nn.Module, arrays: Mapping[str, mx.array]) -> dict[str, Any] | bool:
    """Return the arguments of the module's ``to_quantized`` that match its stored weights.

    Returns False if the stored weights are not quantized. :func:`mlx.nn.quantize` then skips the module.

    Args:
        path: name of the module.
        module: module that is not quantized.
        arrays: stored arrays by name.

    Raises:
        ModelLoadError: the stored weights are not quantized in one of MLX's modes for the module's inputs.
    """
    if not (hasattr(module, "to_quantized") and f"{path}.weight" in arrays and f"{path}.scales" in arrays):
        return False
    has_global_scale = isinstance(module, SwitchLinear) and f"{path}.global_scale" in arrays
    more = {"global_scale": True} if has_global_scale else {}
    return stored_quantization(path, module.weight.shape[-1], arrays) | more


def stored_quantization(path: str, num_inputs: int, arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    """Return the group size, the bits and the mode of a module's stored weights, as arguments for MLX.

    Args:
        path: name of the module.
        num_inputs: number of columns of the weights before quantization.
        arrays: stored arrays by name, with the module's weights and scales.

    Raises:
        ModelLoadError: the weights are not quantized in one of MLX's modes for this number of columns.
    """
    weight, scales = arrays[f"{path}.weight"], arrays[f"{path}.scales"]
    packed, num_groups = (array.shape[-1] if array.ndim else 1 for array in (weight, scales))
    bits, group_size = 32 * packed // num_inputs, num_inputs // max(1, num_groups)
    is_affine = scales.dtype != mx.uint8
    is_known = bits in _BITS and group_size in _GROUP_SIZES if is_affine else (bits, group_size) in _MODES
    if not is_known or group_size * num_groups != num_inputs:
        raise ModelLoadError(f"its weights do not fit the model: {path} is not quantized for {num_inputs} inputs")
    if is_affine and f"{path}.biases" not in arrays:
        raise ModelLoadError(f"its {path} is not quantized in a mode of MLX: use an affine or an unquantized version")
    return {"group_size": group_size, "bits": bits, "mode": "affine" if is_affine else _MODES[bits, group_size]}


def check_types(head: nn.Module) -> None:
    """Raise ModelLoadError if weights are integers without MLX's scales, such as FP8 numbers without their scales."""
    for path, module in head.named_modules():
        for name, array in module.items():
            if isinstance(array, mx.array) and not (
                _is_packed(module, name) or mx.issubdtype(array.dtype, mx.floating)
            ):
                kind = str(array.dtype).removeprefix("mlx.core.")
                raise ModelLoadError(f"its {path}.{name} has the type {kind}, which is not a floating-point type")


def _is_packed(module: nn.Module, name: str) -> bool:
    """Return True if MLX stores this array of a quantized module as integers."""
    if "scales" not in module:
        return False
    is_weight = name == "weight" and module.weight.dtype == mx.uint32
    return is_weight or (name == "scales" and module.mode != "affine" and module.scales.dtype == mx.uint8)


def check_finite(head: nn.Module) -> None:
    """Raise ModelLoadError if a weight is NaN or infinite, because the head's drafts would never be right.

    Evaluates all weights.
    """
    for path, module in head.named_modules():
        for name, array in module.items():
            if isinstance(array, mx.array) and not mx.all(_is_finite(module, array)).item():
                raise ModelLoadError(f"its {path}.{name} has NaN or infinite values: use another version of the head")


def _is_finite(module: nn.Module, array: mx.array) -> mx.array:
    """Return True for each finite element, as an array. Byte scales have codes for NaN: one in E8M0, two in E4M3."""
    if array.dtype == mx.uint8:
        return (array & 0x7F) != 0x7F if module.mode == "nvfp4" else array != 0xFF
    return mx.isfinite(array)
