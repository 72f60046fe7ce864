"""Softmax over keys that come piece by piece, in float32 and base 2.

For each row: the largest score so far, the sum of 2^(score - largest), and the same sum over values (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Dividing the last by the second ends it.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from metal_engine.attention.portable.exp2 import FLOOR, weights_of_scores

MIN_VECTOR = 8_192  # scores; for fewer, compiling for one more shape in every step costs more than it saves


class State(NamedTuple):
    """What is known of each row (row, head of the group) of a tile after some keys. Leading dimensions may differ."""

    peak: mx.array  # [T, Hkv, R * G, 1] largest score
    total: mx.array  # [T, Hkv, R * G, 1] sum of 2^(score - peak)
    out: mx.array  # [T, Hkv, R * G, Dv] the same sum over values


def weights(scores: mx.array, peak: mx.array, on_gpu: bool) -> mx.array:
    """2^(scores - peak), of any shape; ``peak`` broadcasts."""
    if not on_gpu and scores.size >= MIN_VECTOR:
        return weights_of_scores(scores, peak)
    return mx.power(2.0, mx.maximum(scores - peak, FLOOR))


def update(state: State | None, scores: mx.array, values: mx.array, on_gpu: bool) -> State:
    """Add a piece: scores [T, Hkv, R * G, L] in base 2, values [T, Hkv, L, Dv]. Leading dimensions may differ."""
    num_keys = scores.shape[-1]
    peak = mx.max(scores, axis=-1, keepdims=True)
    if state is not None:
        peak = mx.maximum(peak, state.peak)
    by_key = weights(scores, peak, on_gpu)
    # A product with ones, because a sum along the last axis is not vectorized on a CPU.
    total = (by_key.reshape(-1, num_keys) @ mx.ones((num_keys, 1))).reshape(peak.shape)
    out = by_key @ values
    if state is not None:
        shrink = mx.power(2.0, mx.maximum(state.peak - peak, FLOOR))
        total, out = state.total * shrink + total, state.out * shrink + out
    return State(peak, total, out)


def after(x: mx.array, last: list[mx.array]) -> mx.array:
    """``x``, but not before ``last``: pieces that were computed side by side would each hold their scores."""
    return mx.depends([x], last)[0] if last else x
