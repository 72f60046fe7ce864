"""The loss of a chain of drafts: the KL divergence of the head's distributions from the target's."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def draft_losses(
    outputs: Sequence[mx.array], targets: mx.array, weights: mx.array, lm_head: mx.array, rows_per_chunk: int
) -> tuple[mx.array, list[mx.array]]:
    """Return for each pass the weighted sum of its rows' KL divergences, and the gradient of this sum by the outputs.

    Only ``rows_per_chunk`` rows of logits and probabilities exist at a time, because the vocabulary is large. The
    gradient is computed along with the loss: with the target's probabilities p, it is (softmax(z) - p) @ W.

    Args:
        outputs: for each pass, [N, H] rows of the head's output.
        targets: [N, H], the target's hidden states that predict the same tokens.
        weights: [N] float32, weight of each row.
        lm_head: [V, H], weight of the LM head, in the type of the products.
        rows_per_chunk: number of rows whose logits exist at a time. N is a multiple of this number.

    Returns:
        Sums, [K] float32, and for each of the K passes the gradient, [N, H] float32.
    """
    sums = [mx.zeros(())] * len(outputs)
    gradients: list[list[mx.array]] = [[] for _ in outputs]
    for start in range(0, len(targets), rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        scale = weights[rows, None]
        expected, lse = _mean_and_lse(targets[rows], lm_head)
        # log p(token) = hidden @ W[token] - lse, so sums of p * log p need only the mean of W under p.
        negative_entropy = (targets[rows].astype(mx.float32) * expected).sum(axis=-1, keepdims=True) - lse
        for k, output in enumerate(outputs):
            mean, own_lse = _mean_and_lse(output[rows], lm_head)
            log_likelihood = (output[rows].astype(mx.float32) * expected).sum(axis=-1, keepdims=True) - own_lse
            sums[k] = sums[k] + (scale * (negative_entropy - log_likelihood)).sum()
            gradients[k].append(scale * (mean - expected))
    return mx.stack(sums), [mx.concatenate(parts) for parts in gradients]


def _mean_and_lse(hidden: mx.array, lm_head: mx.array) -> tuple[mx.array, mx.array]:
    """Return the mean row of the LM head under the softmax of the logits, [n, H], and the logits' logsumexp, [n, 1]."""
    logits = hidden.astype(lm_head.dtype) @ lm_head.T
    lse = mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True)
    mean = (mx.softmax(logits, axis=-1, precise=True) @ lm_head).astype(mx.float32)
    # With one array for both results, MLX computes them together and then frees the logits.
    both = mx.concatenate([mean, lse], axis=-1)
    return both[:, :-1], both[:, -1:]


def greedy_tokens(outputs: mx.array, lm_head: mx.array) -> mx.array:
    """Return the most likely token of each row: [N, H] -> [N]."""
    return (outputs.astype(lm_head.dtype) @ lm_head.T).argmax(axis=-1)
