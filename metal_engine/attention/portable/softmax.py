"""Softmax over keys that arrive tile by tile, in float32 and base 2.

A key's weight is 2^(score - largest score so far). Each row stores its largest score, the sum of the weights, and the
weighted sum of the values. The result is the weighted sum divided by the sum of the weights (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from metal_engine.attention.portable.exp2 import FLOOR, weights_of_scores

MIN_VECTOR = 8_192  # scores; below this, compiling for one more shape costs more than it saves

Weights = Callable[[mx.array, mx.array], mx.array]
"""Function of scores and a broadcastable peak that returns 2^(scores - peak), in the scores' shape."""


class SoftmaxState(NamedTuple):
    """State of each of a tile's R * G rows (packed row, query head) after some keys. Leading dimensions may differ."""

    peak: mx.array  # [T, Hkv, R * G, 1] largest score
    total: mx.array  # [T, Hkv, R * G, 1] sum of 2^(score - peak)
    out: mx.array  # [T, Hkv, R * G, Dv] sum of 2^(score - peak) * value


def plain_weights(scores: mx.array, peak: mx.array) -> mx.array:
    """Return 2^(scores - peak), computed with MLX's power."""
    return mx.power(2.0, mx.maximum(scores - peak, FLOOR))


def cpu_weights(scores: mx.array, peak: mx.array) -> mx.array:
    """Return 2^(scores - peak) on a CPU, vectorized if there are enough scores."""
    return weights_of_scores(scores, peak) if scores.size >= MIN_VECTOR else plain_weights(scores, peak)


def update(running: SoftmaxState | None, scores: mx.array, values: mx.array, weights: Weights) -> SoftmaxState:
    """Return the state after a tile of L more keys. ``running`` is the state before, None for no keys.

    Args:
        scores: scores in base 2, [T, Hkv, R * G, L]. Leading dimensions may differ.
        values: values, [T, Hkv, L, Dv].
        weights: computes softmax weights.
    """
    num_keys = scores.shape[-1]
    peak = mx.max(scores, axis=-1, keepdims=True)
    if running is not None:
        peak = mx.maximum(peak, running.peak)
    by_key = weights(scores, peak)
    # Sums by a product with ones: a CPU does not vectorize sums along the last axis.
    total = (by_key.reshape(-1, num_keys) @ mx.ones((num_keys, 1))).reshape(peak.shape)
    out = by_key @ values
    if running is not None:
        shrink = plain_weights(running.peak, peak)
        total, out = running.total * shrink + total, running.out * shrink + out
    return SoftmaxState(peak, total, out)


def after(x: mx.array, last: list[mx.array]) -> mx.array:
    """Return ``x``, computed after ``last``. Tiles computed concurrently would each hold their scores in memory."""
    return mx.depends([x], last)[0] if last else x
