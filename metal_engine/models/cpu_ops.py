"""Replacements for operations of mlx-lm's models that MLX's CPU backend computes slowly, element by element.

They take and return the same and differ by float32 rounding. Other devices and dtypes get mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models import activations

from metal_engine.attention.exp2 import LOG2E, exp2

# Compiled pieces are powers of two, so that a step of any number of rows needs no more than a few shapes. This many
# elements stay in a core's cache where there is no compiler, and the operations run one after another.
_LARGEST_PIECE = 1 << 18
_SMALLEST_PIECE = 1 << 11


@mx.compile
def _silu_times(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1.0 + exp2(mx.clip(gate * -LOG2E, -126.0, 126.0))) * x


def in_pieces(function: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """An elementwise ``function`` of arrays of one shape, called with flat pieces of few different sizes."""
    size, shape = arrays[0].size, arrays[0].shape
    flat = [array.reshape(-1) for array in arrays]
    outputs, start = [], 0
    while start < size:
        left = size - start
        piece = left if left < _SMALLEST_PIECE else min(_LARGEST_PIECE, 1 << left.bit_length() - 1)
        outputs.append(function(*(array[start : start + piece] for array in flat)))
        start += piece
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).reshape(shape)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, of any shape."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape and gate.size:
        return in_pieces(_silu_times, gate, x)
    return _mlx_lm_swiglu(gate, x)


_mlx_lm_swiglu = activations.swiglu

# mlx-lm's function -> ours.
REPLACEMENTS: list[tuple[Callable[..., mx.array], Callable[..., mx.array]]] = [(_mlx_lm_swiglu, swiglu)]
