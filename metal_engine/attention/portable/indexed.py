"""Attention to the keys that an index selects, in MLX's operations.

Memory is limited to a few tiles of scores. Each tile, or part of a tile, therefore depends on the previous result, so
that MLX computes only one of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from metal_engine.attention.indexed import (
    NOT_SEEN,
    AttendTile,
    Common,
    IndexQueries,
    KeySelection,
    SelectionPlan,
    SelectionSize,
    Tile,
)
from metal_engine.attention.portable.exp2 import LOG2E
from metal_engine.attention.portable.groups import Limits
from metal_engine.attention.portable.planning import MASKED
from metal_engine.attention.portable.softmax import after, cpu_weights, plain_weights, update
from metal_engine.device.info import computes_on_cpu
from metal_engine.kv_cache.state import IndexState, KVState

_LOW_BITS = 0xFFFFFFFF


def select_keys(
    plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common = lambda positions: positions
) -> KeySelection:
    """Select the keys of a layer. Builds the graph and evaluates nothing.

    Args:
        plan: plan of the step.
        index: queries of the index.
        state: keys of the index, including the rows of this step.
        common: function that returns the selection that all ranks use, given this rank's selection.
    """
    selected: list[mx.array] = []
    last: list[mx.array] = []
    for tile in plan.tiles:
        scores = _scores(plan, tile, index, state, last)
        positions = largest(scores, tile.positions[..., None] // index.size.block_size, index.size.top_k)
        if index.size.block_size > 1:
            positions = keys_of_blocks(positions, tile.positions[..., None], index.size.block_size)
        selected.append(common(positions))
        last = [selected[-1]]
    return KeySelection(plan, selected)


def _scores(plan: SelectionPlan, tile: Tile, index: IndexQueries, state: IndexState, last: list[mx.array]) -> mx.array:
    """Return the scores of a tile's blocks, [T, R, G, number of blocks] float32, after ``last`` has been computed.

    Local blocks have infinite scores. G is 1 if the heads have weights, else the number of heads.
    """
    dims, limits, block_size = plan.dims, plan.limits, index.size.block_size
    num_requests, num_rows, _ = tile.positions.shape
    num_keys = tile.slots.shape[1]
    queries = after(index.queries[tile.rows].astype(mx.float32), last).reshape(num_requests, -1, dims.head_dim)
    most = min(limits.scores // (tile.rows.size * dims.num_heads), limits.span // (num_requests * dims.head_dim))
    span = -(-max(limits.min_keys, most) // block_size) * block_size
    scores: list[mx.array] = []
    for lo in range(0, num_keys, span):
        keys = state.read(after(tile.slots[:, lo : lo + span], last))  # [T, L, D]
        by_head = (queries @ keys.swapaxes(-1, -2)).reshape(num_requests, num_rows, dims.num_heads, -1)
        if index.weights is not None:
            weights = index.weights[tile.rows].astype(mx.float32).reshape(num_requests, num_rows, 1, -1)
            by_head = weights @ mx.maximum(by_head, 0)  # [T, R, 1, L]
        if block_size > 1:
            # A key after the row must not be the largest of its block.
            is_visible = mx.arange(lo, lo + keys.shape[1]) <= tile.positions[..., None]
            by_head = largest_of_blocks(mx.where(is_visible, by_head, -mx.inf), block_size)
        scores.append(by_head)
        last = [by_head]
    whole = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
    return with_local_blocks(whole, tile, index.size)


def with_local_blocks(scores: mx.array, tile: Tile, size: SelectionSize) -> mx.array:
    """Return the scores of a tile's blocks, [T, R, G, number of blocks], with infinite scores of local blocks."""
    if not size.num_local:
        return scores
    blocks, own = mx.arange(scores.shape[-1]), tile.positions[..., None] // size.block_size
    return mx.where((blocks <= own) & (blocks > own - size.num_local), mx.inf, scores)


def largest_of_blocks(scores: mx.array, block_size: int) -> mx.array:
    """Return the largest score of each block, [..., L] -> [..., number of blocks]. The last block may be incomplete."""
    missing = -scores.shape[-1] % block_size
    if missing:
        scores = mx.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, missing)], constant_values=-mx.inf)
    return scores.reshape(*scores.shape[:-1], -1, block_size).max(axis=-1)


def keys_of_blocks(blocks: mx.array, positions: mx.array, block_size: int) -> mx.array:
    """Return the positions of the keys in selected blocks, [..., K] -> [..., K * block_size].

    The result has -1 for keys after their row, and for the keys of a block -1. ``positions`` are the rows' positions,
    [..., 1].
    """
    keys = blocks[..., None] * block_size + mx.arange(block_size)
    keys = mx.where(blocks[..., None] >= 0, keys, NOT_SEEN).flatten(-2)
    return mx.where(keys <= positions, keys, NOT_SEEN)


def largest(scores: mx.array, positions: mx.array, top_k: int) -> mx.array:
    """Return the positions of the largest scores that rows see, in any order.

    If scores are equal, the lowest positions are selected.

    Args:
        scores: score of each key by its position, [..., S] float32.
        positions: position of each row, [..., 1].
        top_k: number of positions, at most S.

    Returns:
        [..., top_k] int32; -1 if a row sees fewer keys.
    """
    num_keys = scores.shape[-1]
    columns = mx.arange(num_keys, dtype=mx.uint32)
    # Each key gets a different integer, so that a partition has only one result. The upper half contains the score, as
    # an unsigned integer of the same order. The lower half is larger for lower positions.
    bits = scores.view(mx.uint32)
    ordered = mx.where(scores >= 0, bits | mx.array(1 << 31, mx.uint32), ~bits)
    ordered = mx.where(columns <= positions, ordered, mx.array(0, mx.uint32))
    keys = (ordered.astype(mx.uint64) << 32) | (_LOW_BITS - columns).astype(mx.uint64)
    first = num_keys - top_k
    best = mx.partition(keys, first, axis=-1)[..., first:] if first else keys
    selected = (_LOW_BITS - (best & _LOW_BITS)).astype(mx.int32)
    return mx.where(selected <= positions, selected, NOT_SEEN)


def tile_attention(q: mx.array, state: KVState, scale: float, limits: Limits) -> AttendTile:
    """Return the function that computes the rows of a tile, in parts. ``q`` are the step's queries, [N, Hq, D]."""
    queries = q.astype(mx.float32) * (scale * LOG2E)
    last: list[mx.array] = []

    def attend(tile: Tile, positions: mx.array) -> Iterator[mx.array]:
        for out in _attend_tile(tile, positions, queries, state, limits, last):
            last[:] = [out]
            yield out.astype(q.dtype)

    return attend


def _attend_tile(
    tile: Tile,
    positions: mx.array,  # [T, R, G, K]
    queries: mx.array,  # [N, Hq, D] float32, scaled
    state: KVState,
    limits: Limits,
    last: list[mx.array],
) -> Iterator[mx.array]:
    """Yield the output of a tile in parts, [rows, Hq, Dv] float32. A part is computed after the arrays in ``last``.

    The caller sets ``last`` to the previous part.
    """
    spec, num_heads = state.spec, queries.shape[1]
    num_kv_heads, (num_selections, num_keys) = spec.num_kv_heads, positions.shape[2:]
    if num_selections not in (1, num_kv_heads):
        raise ValueError(f"an index selects keys for {num_selections} of {num_kv_heads} KV heads")
    weights = cpu_weights if computes_on_cpu() else plain_weights
    # A row that sees fewer keys reads its request's first key instead, which the bias removes.
    slots = mx.take_along_axis(tile.slots[:, None, None], mx.maximum(positions, 0), axis=-1).flatten(0, 1)
    head_rows = slots * num_kv_heads + mx.arange(num_kv_heads)[:, None]  # [T * R, Hkv, K]
    bias = mx.where(positions >= 0, mx.array(0.0), mx.array(MASKED)).flatten(0, 1)[:, :, None]  # [T * R, G, 1, K]
    tile_queries = queries[tile.rows]
    per_row = max(
        num_keys * num_kv_heads * max(spec.head_dim, spec.v_head_dim) / limits.span,
        num_keys * num_heads / limits.scores,
    )
    size = max(1, int(1 / per_row))
    for lo in range(0, tile.rows.size, size):
        part = slice(lo, lo + size)
        keys, values = state.read_heads(after(head_rows[part], last))  # [rows, Hkv, K, D], [rows, Hkv, K, Dv]
        by_group = tile_queries[part].reshape(keys.shape[0], num_kv_heads, -1, queries.shape[-1])
        scores = by_group @ keys.swapaxes(-1, -2) + bias[part]
        softmax = update(None, scores, values, weights)
        out = (softmax.out / softmax.total).reshape(keys.shape[0], num_heads, -1)
        yield out
