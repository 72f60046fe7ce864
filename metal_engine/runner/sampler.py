"""Sampling: one batched pass over the logits of all requests that sample in a step.

Each sampling parameter costs time only for the rows that use it. A row's random draw depends only on the request's seed
and the token's position, not on other requests in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from metal_engine.sampling_params import SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_INT32_MAX = (1 << 31) - 1
# A lower temperature means greedy sampling, as in vLLM. Dividing by a much lower temperature would overflow float32.
_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30  # larger values have the same effect; fits into a float32


class SamplingTable:
    """Sampling parameters of the runner's requests, as arrays over the indices of the requests.

    Args:
        num_seqs: maximum number of requests.
    """

    def __init__(self, num_seqs: int) -> None:
        self.temperature = np.zeros(num_seqs, np.float32)
        self.top_p = np.ones(num_seqs, np.float32)
        self.top_k = np.zeros(num_seqs, np.int32)  # 0: off
        self.min_p = np.zeros(num_seqs, np.float32)
        self.seed = np.zeros(num_seqs, np.uint64)
        self.logprobs = np.full(num_seqs, -1, np.int32)  # -1: not requested
        self.prompt_logprobs = np.full(num_seqs, -1, np.int32)

    def set(self, index: int, params: SamplingParams, seed: int) -> None:
        """Set the parameters of one request. ``seed`` is the request's 64-bit seed; ``params.seed`` is ignored."""
        temperature = min(params.temperature, _MAX_TEMPERATURE)
        self.temperature[index] = temperature if temperature >= _MIN_TEMPERATURE else 0.0
        self.top_p[index] = params.top_p
        self.top_k[index] = min(max(params.top_k, 0), _INT32_MAX)
        self.min_p[index] = params.min_p
        self.seed[index] = seed & _MASK64
        self.logprobs[index] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[index] = -1 if params.prompt_logprobs is None else params.prompt_logprobs


def position_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a random key for each pair of seed and position: output number ``position`` of SplitMix64 from the seed.

    Args:
        seeds: [R] uint64.
        positions: [R] index of the token among the request's output tokens.

    Returns:
        [R, 2] uint32, in the format of ``mx.random``. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
        Generators" (2014).
    """
    z = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.stack([z >> np.uint64(32), z & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def _gumbel(keys: mx.array, vocab_size: int) -> mx.array:
    """Return Gumbel noise from one key per row: keys [R, 2] -> [R, vocab_size] float32.

    The noise is at least -4. Without this limit, one uniform number in 2**32 would give -inf, which could exclude the
    only remaining token. All other numbers give at least -3.1.
    """
    noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
    return mx.maximum(noise, -4.0)


# For a larger k, the k-th largest value is found by bisection instead of partial sorting.
_SMALL_K = 1024
# Bits of infinity. As integers, the bits of positive float32 numbers have the same order as the numbers.
_INFINITY_BITS = 0x7F800000


def _restrict(logits: mx.array, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> mx.array:
    """Set the logits that top-k, top-p and min-p exclude to -inf: [R, V] float32 -> [R, V] float32.

    As in vLLM, min-p is relative to the most likely token before top-k and top-p, and top-p refers to the probability
    that top-k and min-p leave. Tokens as likely as the last kept token are kept, too.
    """
    vocab_size = logits.shape[-1]
    top_k = np.where(top_k < vocab_size, top_k, 0)  # 0: off
    # Distance of each logit from the largest. A limit is the largest distance to keep, [R, 1].
    below = logits.max(axis=-1, keepdims=True) - logits
    with np.errstate(divide="ignore"):
        limit = mx.array(-np.log(min_p, dtype=np.float32))[:, None]
    by_k = np.flatnonzero(top_k > 0)
    if len(by_k):
        at = mx.array(by_k.astype(np.int32))
        limit[at] = mx.minimum(limit[at], _kth_smallest(below[at], top_k[by_k]))
    # The method depends only on the row's own parameters, so its rounding does not depend on the batch.
    is_small = (top_k > 0) & (top_k <= _SMALL_K)
    for by_p, mass_limit in (
        (np.flatnonzero((top_p < 1) & is_small), _mass_limit_of_few),
        (np.flatnonzero((top_p < 1) & ~is_small), _mass_limit),
    ):
        if len(by_p):
            at = mx.array(by_p.astype(np.int32))
            limit[at] = mass_limit(below[at], limit[at], top_p[by_p], top_k[by_p])
    return mx.where(below <= limit, logits, -np.inf)


def _kth_smallest(values: mx.array, k: np.ndarray) -> mx.array:
    """Return the k-th smallest value of each row: values [R, V] float32, not negative; k [R], at least 1 -> [R, 1]."""
    if k.max() <= _SMALL_K:
        smallest = _smallest(values, int(k.max()))
        return mx.take_along_axis(smallest, mx.array(k[:, None] - 1), axis=-1)
    wanted = mx.array(k[:, None])
    return _bisect(values, lambda kept: kept.sum(axis=-1, keepdims=True) >= wanted)


def _smallest(values: mx.array, k: int) -> mx.array:
    """Return the k smallest values of each row in order: [R, V] -> [R, k]."""
    return mx.sort(mx.partition(values, k - 1, axis=-1)[:, :k], axis=-1)


def _mass_limit(below: mx.array, limit: mx.array, top_p: np.ndarray, _top_k: np.ndarray) -> mx.array:
    """Return the limit for top-p. Tokens whose logit is further below the largest logit than the limit are excluded.

    The limit is the smallest one that keeps ``top_p`` of the probability of the tokens that ``limit`` keeps.

    Args:
        below: [R, V] float32, distance of each logit from the largest logit.
        limit: [R, 1] float32, limit of top-k and min-p.
        top_p: [R], less than 1.

    Returns:
        [R, 1] float32.
    """
    weights = mx.where(below <= limit, mx.exp(-below), 0)
    wanted = mx.array(top_p)[:, None] * weights.sum(axis=-1, keepdims=True)
    return mx.minimum(limit, _bisect(below, lambda kept: (weights * kept).sum(axis=-1, keepdims=True) >= wanted))


def _mass_limit_of_few(below: mx.array, limit: mx.array, top_p: np.ndarray, top_k: np.ndarray) -> mx.array:
    """Compute :func:`_mass_limit` for rows in which ``limit`` leaves at most ``top_k`` [R] tokens.

    If several tokens are as likely as token number ``top_k``, ``limit`` may leave more than ``top_k`` tokens.
    """
    nearest = _smallest(below, int(top_k.max()))
    last = mx.exp(-limit)
    num_last = (below == limit).sum(axis=-1, keepdims=True)
    weights = mx.where(nearest <= limit, mx.exp(-nearest), 0)
    # A token is kept if the tokens before it have less probability than top_p: at least one token is kept.
    before = mx.cumsum(weights, axis=-1) - weights
    # A sum over all of `nearest` would have another rounding if other rows have a larger top_k.
    num_below = (nearest < limit).sum(axis=-1, keepdims=True)
    total = mx.take_along_axis(before, num_below, axis=-1) + last * num_last
    wanted = mx.array(top_p)[:, None] * total
    kept = ((before < wanted) & (nearest <= limit)).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(nearest, mx.maximum(kept - 1, 0), axis=-1)


def _bisect(values: mx.array, is_enough: Callable[[mx.array], mx.array]) -> mx.array:
    """Return the smallest limit of each row for which ``is_enough`` is True, [R, 1] float32.

    The result is exact. Takes 31 passes of comparing and adding, which is less than sorting a vocabulary.

    Args:
        values: [R, V] float32, not negative.
        is_enough: function of a mask, [R, V] bool, that is True for each value up to the limit. It returns [R, 1] bool.
            If it returns True for a limit, it must return True for all larger limits. A mask that is True everywhere
            must give True.
    """
    bits = values.view(mx.int32)
    low = mx.full((values.shape[0], 1), -1, mx.int32)  # not enough
    high = mx.full((values.shape[0], 1), _INFINITY_BITS, mx.int32)  # enough
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        middle = mx.minimum(middle, high - 1)
        enough = is_enough(bits <= middle)
        low, high = mx.where(enough, low, middle), mx.where(enough, middle, high)
    return high.view(mx.float32)


def sample(logits: mx.array, table: SamplingTable, indices: np.ndarray, positions: np.ndarray) -> mx.array:
    """Sample one token for each row of logits.

    Args:
        logits: [R, vocab_size], any float dtype.
        table: parameters of all requests.
        indices: [R] index in ``table`` of the request of each row.
        positions: [R] index of the sampled token among the request's output tokens.

    Returns:
        Token ids, [R] int32. Random rows use the Gumbel-max method.
    """
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    drawn = np.flatnonzero(table.temperature[indices] > 0)
    if len(drawn) == 0:
        return tokens
    indices = indices[drawn]
    some = mx.array(drawn.astype(np.int32))
    scaled = logits[some].astype(mx.float32)
    # Subtract the largest logit, so that no temperature causes an overflow.
    scaled = (scaled - scaled.max(axis=-1, keepdims=True)) / mx.array(table.temperature[indices])[:, None]

    top_k, top_p, min_p = table.top_k[indices], table.top_p[indices], table.min_p[indices]
    cut = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if len(cut) == len(drawn):
        scaled = _restrict(scaled, top_k, top_p, min_p)
    elif len(cut):
        at = mx.array(cut.astype(np.int32))
        scaled[at] = _restrict(scaled[at], top_k[cut], top_p[cut], min_p[cut])

    keys = mx.array(position_keys(table.seed[indices], positions[drawn]))
    noise = _gumbel(keys, logits.shape[-1])
    tokens[some] = mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
    return tokens
