"""What is left of a recurrent state from one token of a chunk to another.

Gates are multiplied, never divided, and no logarithm is taken: gates of exactly 0 are as good as any, and nothing
overflows, since a product of gates is at most 1.
"""

from __future__ import annotations

import mlx.core as mx

FLOOR = 2.0**-100  # less is nothing beside 1, and soon a denormal, which is slow


def _without_denormals(decay: mx.array) -> mx.array:
    """0 for what is below FLOOR; what is far above stays as it is."""
    return mx.maximum(decay - FLOOR, 0.0)


def decay_from_start(gates: mx.array) -> mx.array:
    """From before the chunk to each of its tokens, that token's own gate included.

    Args:
        gates: float32, [..., c, d], in [0, 1], of c tokens.

    Returns:
        [..., c, d].
    """
    return _without_denormals(mx.cumprod(gates, axis=-2))


def decay_to_end(gates: mx.array) -> mx.array:
    """From each token of the chunk, its own gate left out, to the last one. Shapes as in :func:`decay_from_start`."""
    return _without_denormals(mx.cumprod(gates, axis=-2, reverse=True, inclusive=False))


def decay_between(gates: mx.array) -> mx.array:
    """From token j to token i: the product of the gates after j, up to i's. 1 where i is j, 0 where j is later.

    Args:
        gates: float32, [..., c, 1], in [0, 1], of c tokens.

    Returns:
        [..., c (i), c (j)].
    """
    size = gates.shape[-2]
    # Column j is 1 down to row j, then the gates of the rows below: its running product is what is wanted. Masks are
    # multiplied with: MLX's CPU backend takes four times as long to select.
    below = mx.tri(size, k=-1)
    return _without_denormals(mx.cumprod(gates * below + (1.0 - below), axis=-2)) * mx.tri(size)
