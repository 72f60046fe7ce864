"""Powers of two on a CPU, in vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np

LOG2E = 1.0 / math.log(2.0)
FLOOR = -100.0  # 2^-100 is nothing beside a row's largest weight, 1, and not yet a denormal, which is slow


def _exp2_coefficients() -> list[float]:
    """Highest power first: 2^f on [-1/2, 1/2] by Chebyshev interpolation of degree 5, relative error 2e-7."""
    nodes = 0.5 * np.cos(np.pi * (np.arange(6) + 0.5) / 6)
    return [float(c) for c in np.polyfit(nodes, 2.0**nodes, 5)]


# Compiled pieces are powers of two, so that a step of any number of rows needs no more than a few shapes. This many
# elements stay in a core's cache where there is no compiler, and the operations run one after another.
_LARGEST_PIECE = 1 << 18
_SMALLEST_PIECE = 1 << 11

_EXP2 = _exp2_coefficients()
_ROUND = 1.5 * 2.0**23  # adding it rounds a float32 to an integer, which is then in the low bits


def exp2(x: mx.array, polynomial: bool = True) -> mx.array:
    """2^x for float32 x in [-126, 126], relative error 3e-7.

    MLX's CPU backend computes exp and power one element at a time (12 and 4 ns each), but add, multiply and
    shift in vectors: the sixteen ops of the polynomial take 2 ns together while the array stays in the cache.
    """
    if not polynomial:
        return mx.power(2.0, x)
    rounded = x + _ROUND
    fraction = x - (rounded - _ROUND)
    p = fraction * _EXP2[0] + _EXP2[1]
    for c in _EXP2[2:]:
        p = p * fraction + c
    # Add the integer part to the exponent field, which starts at bit 23.
    return (p.view(mx.int32) + (rounded.view(mx.int32) << 23)).view(mx.float32)


def _exp2_of_scores(x: mx.array) -> mx.array:
    return exp2(mx.maximum(x, FLOOR))


_compiled_exp2_of_scores = mx.compile(_exp2_of_scores)


def exp2_of_scores(x: mx.array) -> mx.array:
    """2^x on a CPU for float32 x that is 0 or less; what is nothing beside 1 becomes 2^FLOOR."""
    return in_pieces(_exp2_of_scores, _compiled_exp2_of_scores, x)


def in_pieces(
    function: Callable[..., mx.array], compiled: Callable[..., mx.array], *arrays: mx.array
) -> mx.array:
    """An elementwise ``function`` of arrays of one shape; ``compiled`` sees flat pieces of few different sizes."""
    size, shape = arrays[0].size, arrays[0].shape
    flat = [array.reshape(-1) for array in arrays]
    outputs, start = [], 0
    while start < size:
        left = size - start
        large = left >= _SMALLEST_PIECE
        piece = min(_LARGEST_PIECE, 1 << left.bit_length() - 1) if large else left
        outputs.append((compiled if large else function)(*(array[start : start + piece] for array in flat)))
        start += piece
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).reshape(shape)
