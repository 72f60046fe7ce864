"""Log probabilities of tokens and of the most likely alternatives. They ignore logits edits and the temperature."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_engine.request import TokenLogprobs

# Maximum number of rows to convert to float32 at once, because a long prompt has many rows of logits.
_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class LogprobArrays:
    """Log probabilities of L tokens, which stay on the device until :meth:`on_host`."""

    tokens: mx.array  # [L] int32
    logprobs: mx.array  # [L] float32
    ranks: mx.array  # [L] int32, 1: the most likely token
    top_ids: mx.array  # [L, k] int32
    top_logprobs: mx.array  # [L, k] float32

    @property
    def arrays(self) -> list[mx.array]:
        return list(vars(self).values())

    def on_host(self, num_top: list[int]) -> list[TokenLogprobs]:
        """Return one entry for each token, with ``num_top[i]`` alternatives for token i."""
        tokens, logprobs, ranks, top_ids, top_logprobs = (np.array(array).tolist() for array in self.arrays)
        return [
            TokenLogprobs(token, logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)))
            for token, logprob, rank, ids, values, k in zip(
                tokens, logprobs, ranks, top_ids, top_logprobs, num_top, strict=True
            )
        ]


def compute_logprobs(logits: mx.array, tokens: mx.array, num_top: int) -> LogprobArrays:
    """Return the log probabilities of ``tokens``, [L] int32, and of the ``num_top`` likeliest tokens of each row.

    ``logits`` is [L, V].
    """
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        if parts:  # run the pieces in sequence, so that only one float32 copy exists at a time
            (rows,) = mx.depends([rows], list(parts[-1]))
        parts.append(_part(rows, tokens[start : start + _ROWS_AT_ONCE], num_top))
    if len(parts) == 1:
        return LogprobArrays(*parts[0])
    return LogprobArrays(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))


def _part(logits: mx.array, tokens: mx.array, num_top: int) -> tuple[mx.array, ...]:
    logits = logits.astype(mx.float32)
    normalizer = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)  # [L, 1]
    ranks = (logits > chosen).sum(axis=-1) + 1
    num_top = min(num_top, logits.shape[-1])
    if num_top == 0:
        ids = mx.zeros((logits.shape[0], 0), mx.int32)
        values = mx.zeros((logits.shape[0], 0), mx.float32)
    else:
        ids = mx.argpartition(-logits, kth=num_top - 1, axis=-1)[:, :num_top].astype(mx.int32)
        values = mx.take_along_axis(logits, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        ids = mx.take_along_axis(ids, order, axis=-1)
        values = mx.take_along_axis(values, order, axis=-1) - normalizer
    return tokens, (chosen - normalizer)[:, 0], ranks.astype(mx.int32), ids, values
