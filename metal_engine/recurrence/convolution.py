"""Causal depthwise convolution as shifted products: on a CPU, MLX's own convolution computes output by output."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from metal_engine.device.info import computes_on_cpu


def convolve_by_shifts(inputs: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """Compute a depthwise ``nn.Conv1d`` without padding. The result differs only in float32 rounding.

    Args:
        inputs: inputs, [b, s + K-1, C].
        weight: weights, [C, K]. The last weight applies to the row itself.
        bias: biases, [C]; None without biases.

    Returns:
        Outputs, [b, s, C].
    """
    size = weight.shape[1]
    length = inputs.shape[1] - size + 1
    out = inputs[:, :length] * weight[:, 0]
    for shift in range(1, size):
        out = out + inputs[:, shift : shift + length] * weight[:, shift]
    return out if bias is None else out + bias


def may_shift(conv: nn.Conv1d) -> bool:
    """Return True if :func:`convolve_by_shifts` can replace ``conv`` and is faster: on a CPU, in float32."""
    is_plain = conv.weight.shape[-1] == 1 and conv.groups == conv.weight.shape[0]
    is_plain = is_plain and conv.stride == 1 and conv.dilation == 1 and conv.padding == 0
    return bool(is_plain and conv.weight.dtype == mx.float32 and computes_on_cpu())
