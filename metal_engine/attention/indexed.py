"""Attention to the keys that an index selects (sparse attention), in MLX's operations on any device.

On Metal, kernels replace the operations for DeepSeek's index (:mod:`metal_engine.attention.metal.indexed`).

An index stores a key for each token. In a step, it scores every key j of a row's own request. Row r attends to the
``top_k`` visible keys with the largest scores. DeepSeek's index has one score for all heads::

    score[r, j] = sum over heads h of weights[r, h] * max(0, queries[r, h] . index_keys[j])

MiniMax's index selects for each KV head, by ``queries[r, h] . index_keys[j]``. It selects ``top_k`` blocks of keys: the
last blocks, and the blocks of the keys with the largest scores.

If scores are equal, the index selects the lowest positions. The selection is then the same on any device and with any
chunks. The rows of a request with few keys attend to all keys: a backend computes these rows as in other layers.

The other requests are planned once per step, in tiles of rows. A tile has one request with many rows, or several
requests with few rows each, such as decodes. Memory is limited to a few tiles of scores, for contexts of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from metal_engine.attention.portable.exp2 import LOG2E
from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS, Dims, Limits, RowSegment, group_segments
from metal_engine.attention.portable.planning import MASKED
from metal_engine.attention.portable.softmax import after, cpu_weights, plain_weights, update
from metal_engine.device.info import computes_on_cpu
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import IndexState, KVState

if TYPE_CHECKING:
    from metal_engine.attention.backend import StepAttention

_NOT_SEEN = -1  # replaces the position of a selected key that the row may not see
_LOW_BITS = 0xFFFFFFFF
# A tile of all keys is smaller than a tile of scores by this factor, because it is held in several arrays of 64 bits.
_SORTED_ARRAYS = 4


@dataclass(frozen=True)
class SelectionSize:
    """Number of keys that a row selects.

    Attributes:
        top_k: number of blocks.
        block_size: tokens of a block.
        num_local: number of last blocks that a row always selects, including the block of its own position.
    """

    top_k: int
    block_size: int = 1
    num_local: int = 0

    @property
    def num_keys(self) -> int:
        return self.top_k * self.block_size


@dataclass(frozen=True)
class IndexQueries:
    """Queries of a layer's index in one step.

    Attributes:
        queries: [N, num_heads, head_dim].
        weights: weight of each head, [N, num_heads]; None if each head selects keys for one KV head.
        size: number of keys that a row selects.
    """

    queries: mx.array
    weights: mx.array | None
    size: SelectionSize

    @property
    def dims(self) -> Dims:
        _, num_heads, head_dim = self.queries.shape
        return Dims(num_heads, 1, head_dim)


@dataclass(frozen=True)
class _Keys:
    """Keys of requests, uploaded at first use.

    Attributes:
        step: rows of the step.
        requests: index of each request, [T].
        ends: number of keys of each request, [T].
    """

    step: StepRows
    requests: np.ndarray
    ends: np.ndarray

    @cached_property
    def slots(self) -> mx.array:
        """Slots of the keys, [T, S] int32. Padding repeats a request's last key."""
        keys = np.minimum(np.arange(self.ends.max()), self.ends[:, None] - 1)
        return mx.array(self.step.slots(self.requests[:, None], keys).astype(np.int32))


@dataclass(frozen=True)
class Tile:
    """R rows of each of T requests, which select among S keys. Padding repeats a request's last row and last key.

    Attributes:
        packed: packed row of each row, [T * R].
        own_positions: position of each row, [T, R].
        num_keys: S.
        is_group: True for several requests with few rows each, or one such request. The rows of any such tile are
            computed as if each row were alone.
    """

    packed: np.ndarray
    own_positions: np.ndarray
    keys: _Keys
    num_keys: int
    is_group: bool

    @property
    def requests(self) -> np.ndarray:
        """Index of each request in the step, [T]."""
        return self.keys.requests

    @cached_property
    def rows(self) -> mx.array:
        """Packed rows, [T * R] int32."""
        return mx.array(self.packed.astype(np.int32))

    @cached_property
    def positions(self) -> mx.array:
        """Positions, [T, R, 1] int32."""
        return mx.array(self.own_positions[..., None].astype(np.int32))

    @cached_property
    def slots(self) -> mx.array:
        """Slots of the keys, [T, S] int32."""
        return self.keys.slots[:, : self.num_keys]


@dataclass
class SelectionPlan:
    """Rows of one step that select keys. Layers whose indexes have the same sizes share the plan.

    Attributes:
        dims: dimensions of the index.
        num_rows: number of packed rows, N.
        others: rows of the requests that attend to all keys; None if there are no such requests.
        other_rows: packed rows of these requests, [M]; None if there are no such requests.
        tiles: rows of all other requests.
        order: index of each packed row in the concatenation of the other rows and the tiles, [N].
    """

    dims: Dims
    num_rows: int
    limits: Limits
    others: StepRows | None
    other_rows: mx.array | None
    tiles: list[Tile]
    order: mx.array
    _attention: dict[Hashable, StepAttention] = field(default_factory=dict)

    def attention_of_others(self, owner: object, for_step: Callable[[StepRows], StepAttention]) -> StepAttention:
        """Return the attention of ``others``, created once for each ``owner``: the attention of the whole step."""
        assert self.others is not None
        if id(owner) not in self._attention:
            self._attention[id(owner)] = for_step(self.others)
        return self._attention[id(owner)]


@dataclass(frozen=True)
class KeySelection:
    """Keys that the rows of one layer attend to.

    Attributes:
        plan: plan of the step.
        positions: for each tile, positions of the selected keys, [T, R, G, K] int32. G is 1, or the number of KV heads
            if each KV head has its own keys. A position is -1 if a row sees fewer keys.
        is_sorted: True if each row's positions rise, with -1 at the end. The kernel requires this order.
    """

    plan: SelectionPlan
    positions: list[mx.array]
    is_sorted: bool = False

    def by_row(self) -> np.ndarray:
        """Return the selected positions of each packed row, [N, G, K] int32. -1 for no key, and for other requests."""
        shape = self.positions[0].shape[2:]
        found = np.full((self.plan.num_rows, *shape), _NOT_SEEN, np.int32)
        for tile, positions in zip(self.plan.tiles, self.positions, strict=True):
            found[np.array(tile.rows)] = np.array(positions).reshape(-1, *shape)
        return found


def plan_selection(rows: StepRows, num_keys: int, dims: Dims, limits: Limits | None = None) -> SelectionPlan | None:
    """Divide a step's rows for an index. Return None if no request has more than ``num_keys`` keys."""
    is_selecting = rows.seq_lens > num_keys
    if not is_selecting.any():
        return None
    limits = limits or (CPU_LIMITS if computes_on_cpu() else GPU_LIMITS)
    segments = [
        RowSegment(i, int(rows.cu_seqlens_q[i]), int(rows.query_lens[i]), 0, int(rows.seq_lens[i]))
        for i in np.flatnonzero(is_selecting).tolist()
    ]
    small = [s for s in segments if s.num_rows == 1 or s.num_rows * s.num_keys <= limits.small_area]
    groups = group_segments(small, dims, limits)
    planned = [
        *(_group(rows, group) for group in groups),
        *(tile for s in segments if s not in small for tile in _tiles(rows, s, num_keys, limits)),
    ]
    others, other_rows = None, np.flatnonzero(~is_selecting[rows.request_of_row])
    if len(other_rows):
        others = rows.of_requests(np.flatnonzero(~is_selecting))
    places = np.concatenate([other_rows, *(places for places, _ in planned)])
    order = np.empty(rows.num_tokens, np.int32)
    order[places[places >= 0]] = np.flatnonzero(places >= 0)
    uploaded = None if others is None else mx.array(other_rows.astype(np.int32))
    tiles = [tile for _, tile in planned]
    return SelectionPlan(dims, rows.num_tokens, limits, others, uploaded, tiles, mx.array(order))


_PlannedTile = tuple[np.ndarray, Tile]
"""Packed row of each row of a tile, [T * R], -1 for padding; and the tile."""


def _group(rows: StepRows, segments: list[RowSegment]) -> _PlannedTile:
    """Return the tile of several requests with few rows each."""
    fields = ((s.request, s.start, s.num_rows, s.key_end) for s in segments)
    request, start, num_rows, key_end = map(np.array, zip(*fields, strict=True))  # each [T]
    row = np.arange(num_rows.max())
    own = np.minimum(row, num_rows[:, None] - 1)  # [T, R]
    packed = start[:, None] + own
    positions = (key_end - num_rows)[:, None] + own
    place = np.where(row < num_rows[:, None], packed, -1).ravel()
    return place, Tile(packed.ravel(), positions, _Keys(rows, request, key_end), int(key_end.max()), is_group=True)


def _tiles(rows: StepRows, segment: RowSegment, least_keys: int, limits: Limits) -> Iterator[_PlannedTile]:
    """Yield the tiles of one request with many rows. A tile's keys end with the last key that one of its rows sees."""
    keys = _Keys(rows, np.array([segment.request]), np.array([segment.key_end]))
    size = max(1, min(limits.tile_rows, limits.scores // (_SORTED_ARRAYS * segment.num_keys)))
    for lo in range(0, segment.num_rows, size):
        own = np.arange(lo, min(lo + size, segment.num_rows))
        num_keys = max(segment.context_len + int(own[-1]) + 1, least_keys)
        packed = segment.start + own
        yield packed, Tile(packed, segment.context_len + own[None], keys, num_keys, is_group=False)


Common = Callable[[mx.array], mx.array]
"""Function that returns the selection of all ranks, given the positions that this rank has selected."""


def select_keys(
    plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common = lambda positions: positions
) -> KeySelection:
    """Select the keys of a layer. Builds the graph and evaluates nothing.

    Args:
        common: returns the selection that all ranks use.
    """
    selected: list[mx.array] = []
    last: list[mx.array] = []
    for tile in plan.tiles:
        scores = _scores(plan, tile, index, state, last)
        positions = largest(scores, tile.positions[..., None] // index.size.block_size, index.size.top_k)
        if index.size.block_size > 1:
            positions = _keys_of_blocks(positions, tile.positions[..., None], index.size.block_size)
        selected.append(common(positions))
        last = [selected[-1]]
    return KeySelection(plan, selected)


def _scores(plan: SelectionPlan, tile: Tile, index: IndexQueries, state: IndexState, last: list[mx.array]) -> mx.array:
    """Return the scores of a tile's blocks, [T, R, G, number of blocks] float32. Local blocks have infinite scores."""
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
            by_head = _largest_of_blocks(mx.where(is_visible, by_head, -mx.inf), block_size)
        scores.append(by_head)
        last = [by_head]
    whole = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
    if index.size.num_local:
        blocks, own = mx.arange(whole.shape[-1]), tile.positions[..., None] // block_size
        whole = mx.where((blocks <= own) & (blocks > own - index.size.num_local), mx.inf, whole)
    return whole


def _largest_of_blocks(scores: mx.array, block_size: int) -> mx.array:
    """Return the largest score of each block, [..., L] -> [..., number of blocks]. The last block may be incomplete."""
    missing = -scores.shape[-1] % block_size
    if missing:
        scores = mx.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, missing)], constant_values=-mx.inf)
    return scores.reshape(*scores.shape[:-1], -1, block_size).max(axis=-1)


def _keys_of_blocks(blocks: mx.array, positions: mx.array, block_size: int) -> mx.array:
    """Return the positions of the keys in selected blocks, [..., K] -> [..., K * block_size]; -1 for unseen keys."""
    keys = blocks[..., None] * block_size + mx.arange(block_size)
    keys = mx.where(blocks[..., None] >= 0, keys, _NOT_SEEN).flatten(-2)
    return mx.where(keys <= positions, keys, _NOT_SEEN)


def largest(scores: mx.array, positions: mx.array, top_k: int) -> mx.array:
    """Return the positions of the largest scores that rows see, in any order. Of equal scores, the lowest positions.

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
    return mx.where(selected <= positions, selected, _NOT_SEEN)


AttendTile = Callable[[Tile, mx.array], mx.array]
"""Function of a tile and the positions that it selects."""


def attend_selected(
    selection: KeySelection,
    owner: object,
    for_step: Callable[[StepRows], StepAttention],
    q: mx.array,  # [N, Hq, D]
    state: KVState,
    scale: float,
    attend_tile: AttendTile | None = None,
) -> mx.array:  # [N, Hq, Dv], dtype of q; for latents, the latent_dim columns
    """Compute attention of every packed row to its selected keys, or to all keys if its request has few.

    Args:
        selection: keys that rows attend to.
        owner: the attention of the step, see :meth:`SelectionPlan.attention_of_others`.
        for_step: function of the backend that plans a step's attention.
        q: queries.
        state: keys and values, which include those of this step.
        scale: factor of the scores.
        attend_tile: function that computes the rows of a tile, [T * R, Hq, Dv]; None for MLX's operations.
    """
    plan = selection.plan
    width = state.spec.latent_dim or state.spec.v_head_dim
    outputs: list[mx.array] = []
    if plan.other_rows is not None:
        others = plan.attention_of_others(owner, for_step)
        outputs.append(others.attend(q[plan.other_rows], state, scale=scale)[..., :width])
    if attend_tile is not None:
        outputs += [attend_tile(*tile) for tile in zip(plan.tiles, selection.positions, strict=True)]
        return mx.concatenate(outputs)[plan.order]
    queries = q.astype(mx.float32) * (scale * LOG2E)
    last: list[mx.array] = []
    for tile, positions in zip(plan.tiles, selection.positions, strict=True):
        for out in _attend_tile(tile, positions, queries, state, plan.limits, last):
            outputs.append(out[..., :width].astype(q.dtype))
            last = [out]
    return mx.concatenate(outputs)[plan.order]


def _attend_tile(
    tile: Tile,
    positions: mx.array,  # [T, R, G, K]
    queries: mx.array,  # [N, Hq, D] float32, scaled
    state: KVState,
    limits: Limits,
    last: list[mx.array],
) -> Iterator[mx.array]:
    """Yield the output of some rows of a tile after another, [rows, Hq, Dv] float32."""
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
        last = [out]
