"""A causal depthwise convolution as shifted products: MLX's own on a CPU goes output by output."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from metal_engine.device.info import computes_on_cpu


def convolve_by_shifts(inputs: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """``nn.Conv1d`` without padding, each channel by itself, but for float32 rounding.

    Args:
        inputs: [b, s + K-1, C].
        weight: [C, K], the last for a row itself.
        bias: [C].

    Returns:
        [b, s, C].
    """
    size = weight.shape[1]
    length = inputs.shape[1] - size + 1
    out = inputs[:, :length] * weight[:, 0]
    for shift in range(1, size):
        out = out + inputs[:, shift : shift + length] * weight[:, shift]
    return out if bias is None else out + bias


def may_shift(conv: nn.Conv1d) -> bool:
    """Whether :func:`convolve_by_shifts` computes what a module does, and faster: on a CPU, in float32."""
    is_plain = conv.weight.shape[-1] == 1 and conv.groups == conv.weight.shape[0]
    is_plain = is_plain and conv.stride == 1 and conv.dilation == 1 and conv.padding == 0
    return bool(is_plain and conv.weight.dtype == mx.float32 and computes_on_cpu())
