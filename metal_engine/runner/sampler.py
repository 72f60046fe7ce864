"""Sampling: one batched pass over the logits of all requests that sample in a step.

Each control costs only the rows that use it. A row's random draw depends on its own seed and position alone,
never on what else is in the batch.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_engine.request import SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_INT32_MAX = (1 << 31) - 1
# Below this a temperature means greedy, as in vLLM; dividing by much less would overflow float32.
_MIN_TEMPERATURE = 1e-5


class SamplingRows:
    """Sampling parameters of the requests the runner holds, as arrays, one row a request.

    Args:
        num_rows: rows to hold.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)  # 0: off
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)

    def set(self, row: int, params: SamplingParams) -> None:
        self.temperature[row] = params.temperature if params.temperature >= _MIN_TEMPERATURE else 0.0
        self.top_p[row] = params.top_p
        self.top_k[row] = min(max(params.top_k, 0), _INT32_MAX)
        self.min_p[row] = params.min_p
        self.seed[row] = (params.seed or 0) & _MASK64  # the engine gives every request that draws a seed


def position_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A key for each (seed, position): SplitMix64's output function over ``seed + position * golden``.

    Args:
        seeds: [R] uint64.
        positions: [R] index of the token among those generated.

    Returns:
        [R, 2] uint32, as ``mx.random`` takes them. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom
        Number Generators" (2014).
    """
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.stack([z >> np.uint64(32), z & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def _gumbel(keys: mx.array, vocab_size: int) -> mx.array:
    """Gumbel noise from one key a row: keys [R, 2] -> [R, vocab_size] float32.

    One uniform number in 2**32 is exactly 0 and becomes -inf, which would make the only token that is left
    look excluded. Every other one gives at least -3.1.
    """
    noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
    return mx.maximum(noise, -4.0)


def _restrict(logits: mx.array, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> mx.array:
    """Set the logits that top-k, top-p and min-p exclude to -inf: [R, V] float32 -> the same.

    As in vLLM, min-p compares with the most likely token before top-k and top-p cut anything, and top-p
    counts the probability of what top-k left. Ties with the last token kept are kept.
    """
    vocab_size = logits.shape[-1]
    lowest = mx.full((len(top_k), 1), -np.inf, mx.float32)  # lowest logit kept, per row
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):
            log_min_p = mx.array(np.log(min_p))[:, None]
        lowest = mx.maximum(lowest, logits.max(axis=-1, keepdims=True) + log_min_p)
    if (top_k > 0).any() or (top_p < 1).any():
        ordered = -mx.sort(-mx.where(logits >= lowest, logits, -np.inf), axis=-1)  # descending
        k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
        kth = mx.take_along_axis(ordered, mx.array(k[:, None] - 1), axis=-1)
        lowest = mx.maximum(lowest, kth)
        probs = mx.softmax(mx.where(ordered >= lowest, ordered, -np.inf), axis=-1)
        # A token is kept while the probability of those before it is below top_p: always at least one.
        kept = (mx.cumsum(probs, axis=-1) - probs < mx.array(top_p)[:, None]).sum(axis=-1, keepdims=True)
        last = mx.take_along_axis(ordered, mx.maximum(kept - 1, 0), axis=-1)
        lowest = mx.where(mx.array(top_p < 1)[:, None], mx.maximum(lowest, last), lowest)
    return mx.where(logits >= lowest, logits, -np.inf)


def sample(logits: mx.array, rows: SamplingRows, indices: np.ndarray, positions: np.ndarray) -> mx.array:
    """Draw one token for each row of logits.

    Args:
        logits: [R, vocab_size], any float dtype.
        rows: parameters of all requests.
        indices: [R] row of ``rows`` of each row of logits.
        positions: [R] index of the token being drawn among those its request generates.

    Returns:
        Token ids, [R] int32. Random rows use the Gumbel-max method.
    """
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    drawn = np.flatnonzero(rows.temperature[indices] > 0)
    if len(drawn) == 0:
        return tokens
    indices = indices[drawn]
    some = mx.array(drawn.astype(np.int32))
    scaled = logits[some].astype(mx.float32)
    # Relative to the largest, so that no temperature makes one overflow.
    scaled = (scaled - scaled.max(axis=-1, keepdims=True)) / mx.array(rows.temperature[indices])[:, None]

    top_k, top_p, min_p = rows.top_k[indices], rows.top_p[indices], rows.min_p[indices]
    cut = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if len(cut) == len(drawn):
        scaled = _restrict(scaled, top_k, top_p, min_p)
    elif len(cut):
        at = mx.array(cut.astype(np.int32))
        scaled[at] = _restrict(scaled[at], top_k[cut], top_p[cut], min_p[cut])

    keys = mx.array(position_keys(rows.seed[indices], positions[drawn]))
    noise = _gumbel(keys, logits.shape[-1])
    tokens[some] = mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
    return tokens
