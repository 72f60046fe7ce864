"""Decay of a recurrent state between two tokens of a chunk: the product of the tokens' gates.

Gates are only multiplied, without division or logarithm. Gates of exactly 0 therefore work. Nothing overflows, because
a product of gates is at most 1.
"""

from __future__ import annotations

import mlx.core as mx

FLOOR = 2.0**-100  # smaller decays are negligible, and their products would soon be denormals, which are slow


def _without_denormals(decay: mx.array) -> mx.array:
    """Subtract FLOOR from decays, and replace negative results by 0. Rounding keeps much larger decays unchanged."""
    return mx.maximum(decay - FLOOR, 0.0)


def decay_from_start(gates: mx.array) -> mx.array:
    """Return the decay from before the chunk to each of its tokens, including the token's own gate.

    Args:
        gates: gates of c tokens in [0, 1], float32 [..., c, d].

    Returns:
        Decays, [..., c, d].
    """
    return _without_denormals(mx.cumprod(gates, axis=-2))


def decay_to_end(gates: mx.array) -> mx.array:
    """Return the decay from each token to the chunk's end, excluding the token's own gate.

    The shapes are those of :func:`decay_from_start`.
    """
    return _without_denormals(mx.cumprod(gates, axis=-2, reverse=True, inclusive=False))


def decay_between(gates: mx.array) -> mx.array:
    """Return the decay from token j to token i: the product of the gates after j up to i. 1 if i = j, 0 if i < j.

    Args:
        gates: gates of c tokens in [0, 1], float32 [..., c, 1].

    Returns:
        Decays, [..., c (i), c (j)].
    """
    size = gates.shape[-2]
    # Column j is 1 down to row j, followed by the gates of the rows below. Its cumulative product is the decay. Masks
    # are multiplied, because a select takes four times as long in MLX's CPU backend.
    below = mx.tri(size, k=-1)
    return _without_denormals(mx.cumprod(gates * below + (1.0 - below), axis=-2)) * mx.tri(size)
