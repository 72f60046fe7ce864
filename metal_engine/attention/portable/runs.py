"""Decodes that read most of their keys directly from the cache.

The keys of all KV heads of a token are treated as one row, [Hkv * D]. A query is padded with zeros in the columns of
other KV heads. A run of consecutive slots is then a contiguous matrix in the cache, which a product reads directly. A
gather of the keys, head by head, would take longer than all other work. The zeros cost little: the product has few rows
of queries and many keys, so memory bandwidth limits its speed. Keys outside the runs are gathered, for all requests
together.
"""

from __future__ import annotations

import mlx.core as mx

from metal_engine.attention.portable.exp2 import LOG2E
from metal_engine.attention.portable.planning import RunDecodes
from metal_engine.attention.portable.softmax import SoftmaxState, Weights, after, update
from metal_engine.kv_cache.state import KVState


def attend_runs(
    decodes: RunDecodes,
    queries: mx.array,
    state: KVState,
    softcap: float | None,
    sinks: mx.array | None,
    last: list[mx.array],
    weights: Weights,
) -> mx.array:
    """Compute attention of the T decodes of ``decodes`` on a CPU.

    Args:
        decodes: runs and other keys of the decodes.
        queries: scaled queries of the step, [N, Hq, D] float32.
        state: state of the layer.
        softcap: softcap of the scores, or None.
        sinks: attention sinks, [Hq]; see :meth:`metal_engine.attention.backend.StepAttention.attend`.
        last: results of the previous computation. MLX computes them first, so that only one computation at a time holds
            temporary arrays.
        weights: computes softmax weights.

    Returns:
        Outputs, [T, Hq, Dv] float32.
    """
    num_heads, num_kv_heads = queries.shape[1], state.spec.num_kv_heads
    queries = decodes.queries.of(queries, num_kv_heads)  # [T, Hkv, G, D]
    if num_kv_heads > 1:
        queries = mx.expand_dims(queries, 3) * decodes.own_heads  # [T, Hkv, G, Hkv, D]
    queries = queries.reshape(len(decodes.runs), num_heads, -1)  # [T, Hq, Hkv * D]

    columns = mx.contiguous(queries.swapaxes(1, 2))  # [T, Hkv * D, Hq]
    seen_by_request = []
    for request, parts in enumerate(decodes.runs):
        seen: _Seen | None = None
        for slot, count in parts:
            k, v = state.read_tokens(slice(slot, slot + count))
            # Scores by key, [L, Hq], so that the product reads both matrices in their memory order.
            scores = _capped(k @ after(columns[request], last), softcap)
            seen = _add(seen, scores, v, weights)
            last = list(seen[1:])
        seen_by_request.append(seen)
    peaks, totals, outs = (mx.stack(list(arrays)) for arrays in zip(*seen_by_request, strict=True))
    running = SoftmaxState(peaks.swapaxes(1, 2), totals.swapaxes(1, 2), outs)  # [T, Hq, 1] twice, [T, Hq, Hkv * Dv]
    if decodes.rest is not None:
        k, v = state.read_tokens(after(decodes.rest, last))  # [T, S, Hkv * D]
        scores = _capped(queries @ k.swapaxes(1, 2), softcap)  # [T, Hq, S]
        running = update(running, scores if decodes.bias is None else scores + decodes.bias, v, weights)
    if sinks is not None:  # keys with a value of zero
        scores = mx.broadcast_to((sinks.astype(mx.float32) * LOG2E)[:, None], running.peak.shape)
        running = update(running, scores, mx.zeros((len(decodes.runs), 1, 1)), weights)
    return _own_heads(running.out / running.total, num_kv_heads)


_Seen = tuple[mx.array, mx.array, mx.array]  # for one request: peak [1, Hq], total [1, Hq], out [Hq, Hkv * Dv]


def _add(seen: _Seen | None, scores: mx.array, values: mx.array, weights: Weights) -> _Seen:
    """Add L keys as :func:`update` does, with scores by key, [L, Hq]. ``seen`` is None for a request's first keys."""
    peak = mx.max(scores, axis=0, keepdims=True)
    if seen is not None:
        peak = mx.maximum(peak, seen[0])
    by_key = weights(scores, peak)
    total, out = mx.ones((1, len(scores))) @ by_key, by_key.T @ values
    if seen is not None:
        shrink = weights(seen[0], peak)
        total, out = seen[1] * shrink + total, seen[2] * shrink.T + out
    return peak, total, out


def _capped(scores: mx.array, softcap: float | None) -> mx.array:
    return mx.tanh(scores) * (softcap * LOG2E) if softcap else scores


def _own_heads(out: mx.array, num_kv_heads: int) -> mx.array:
    """Select each query head's own KV head from sums over all of them: [T, Hq, Hkv * Dv] -> [T, Hq, Dv]."""
    if num_kv_heads == 1:
        return out
    num_requests, num_heads = out.shape[:2]
    by_head = out.reshape(num_requests, num_kv_heads, num_heads // num_kv_heads, num_kv_heads, -1)
    return mx.concatenate([by_head[:, head, :, head] for head in range(num_kv_heads)], axis=1)
