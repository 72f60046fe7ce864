"""Softmax over keys that come tile by tile, in float32 and base 2.

For each row: the largest score so far, the sum of 2^(score - largest), and the same sum over values (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Dividing the last by the second ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from metal_engine.attention.portable.exp2 import FLOOR, weights_of_scores

MIN_VECTOR = 8_192  # scores; for fewer, compiling for one more shape in every step costs more than it saves

Weights = Callable[[mx.array, mx.array], mx.array]
"""From scores and a peak that broadcasts to 2^(scores - peak), of the scores' shape."""


class SoftmaxState(NamedTuple):
    """What is known of each row (row, head of the group) of a tile after some keys. Leading dimensions may differ."""

    peak: mx.array  # [T, Hkv, R * G, 1] largest score
    total: mx.array  # [T, Hkv, R * G, 1] sum of 2^(score - peak)
    out: mx.array  # [T, Hkv, R * G, Dv] the same sum over values


def plain_weights(scores: mx.array, peak: mx.array) -> mx.array:
    """2^(scores - peak) by MLX's own power."""
    return mx.power(2.0, mx.maximum(scores - peak, FLOOR))


def cpu_weights(scores: mx.array, peak: mx.array) -> mx.array:
    """The same on a CPU: in vectors, where there are enough of them."""
    return weights_of_scores(scores, peak) if scores.size >= MIN_VECTOR else plain_weights(scores, peak)


def update(running: SoftmaxState | None, scores: mx.array, values: mx.array, weights: Weights) -> SoftmaxState:
    """Add a tile: scores [T, Hkv, R * G, L] in base 2, values [T, Hkv, L, Dv]. Leading dimensions may differ."""
    num_keys = scores.shape[-1]
    peak = mx.max(scores, axis=-1, keepdims=True)
    if running is not None:
        peak = mx.maximum(peak, running.peak)
    by_key = weights(scores, peak)
    # A product with ones, because a sum along the last axis is not vectorized on a CPU.
    total = (by_key.reshape(-1, num_keys) @ mx.ones((num_keys, 1))).reshape(peak.shape)
    out = by_key @ values
    if running is not None:
        shrink = plain_weights(running.peak, peak)
        total, out = running.total * shrink + total, running.out * shrink + out
    return SoftmaxState(peak, total, out)


def after(x: mx.array, last: list[mx.array]) -> mx.array:
    """``x``, but not before ``last``: tiles that were computed side by side would each hold their scores."""
    return mx.depends([x], last)[0] if last else x
