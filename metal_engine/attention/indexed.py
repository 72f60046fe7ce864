"""Attention to the keys that an index selects (sparse attention): the plan of a step, and the selection of a layer.

MLX's operations select keys and attend to them on any device (:mod:`metal_engine.attention.portable.indexed`). On
Metal, kernels do this (:mod:`metal_engine.attention.metal.indexed`).

An index stores a key for each token. In a step, it computes a score for each row r and each key j of the row's request.
Row r attends to the ``top_k`` visible keys with the largest scores. DeepSeek's index has one score for all heads::

    score[r, j] = sum over heads h of weights[r, h] * max(0, queries[r, h] . index_keys[j])

MiniMax's index selects keys for each KV head separately. The scores are ``queries[r, h] . index_keys[j]``. It selects
``top_k`` blocks of keys: the last blocks, and the blocks of the keys with the largest scores.

If scores are equal, the index selects the lowest positions, so that the selection is the same on any device and for any
division of the prompt into chunks. If a request has no more keys than a row selects, its rows attend to all keys. A
backend computes these rows as in layers without an index.

The rows that select keys are planned once per step, in tiles. A tile has rows of one request with many rows, or of
several requests with few rows each, such as decodes. Memory is limited to a few tiles of scores, for contexts of any
length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS, Dims, Limits, RowSegment, group_segments
from metal_engine.device.info import computes_on_cpu
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import KVState

if TYPE_CHECKING:
    from metal_engine.attention.backend import StepAttention

NOT_SEEN = -1  # replaces the position of a selected key that the row may not see
# A tile has at most ``Limits.scores`` / _SORTED_ARRAYS scores, because the selection holds several arrays with 64 bits
# for each score.
_SORTED_ARRAYS = 4


@dataclass(frozen=True)
class SelectionSize:
    """Number of keys that a row selects.

    Attributes:
        top_k: number of blocks that a row selects.
        block_size: number of keys in a block of the index; 1 to select single keys. These blocks are unrelated to the
            blocks of the KV cache.
        num_local: number of last blocks that a row always selects, including the block of its own position.
    """

    top_k: int
    block_size: int = 1
    num_local: int = 0

    @property
    def num_keys(self) -> int:
        return self.top_k * self.block_size

    def num_seen(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of visible selected keys of the row at each position. Keys after a row are not visible.

        For blocks of several keys, each row must select the block of its own position (``num_local`` above 0).
        """
        last = (self.top_k - 1) * self.block_size + positions % self.block_size + 1
        return np.minimum(positions + 1, last)


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
    """Keys of the T requests of a tile. Their slots are uploaded at first use.

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
        packed: index of each row among the step's packed rows, [T * R].
        own_positions: position of each row in its request, [T, R].
        keys: keys of the requests, at least S for each.
        num_keys: S.
        is_group: True for a tile of one or more requests with few rows each, such as decodes. The result of such a row
            must not depend on the other rows of the step.
    """

    packed: np.ndarray
    own_positions: np.ndarray
    keys: _Keys
    num_keys: int
    is_group: bool

    @property
    def requests(self) -> np.ndarray:
        """Indices of the tile's requests within the step, [T]."""
        return self.keys.requests

    @cached_property
    def rows(self) -> mx.array:
        """``packed`` on the device, [T * R] int32."""
        return mx.array(self.packed.astype(np.int32))

    @cached_property
    def positions(self) -> mx.array:
        """``own_positions`` on the device, [T, R, 1] int32."""
        return mx.array(self.own_positions[..., None].astype(np.int32))

    @cached_property
    def slots(self) -> mx.array:
        """Slots of the keys, [T, S] int32."""
        return self.keys.slots[:, : self.num_keys]


@dataclass
class SelectionPlan:
    """Division of a step's rows into rows that select keys and rows that attend to all keys.

    Layers whose indexes have the same sizes share the plan.

    Attributes:
        dims: dimensions of the index.
        num_rows: number of packed rows, N.
        limits: limits of the sizes of tiles and of temporary arrays.
        full_step: rows of the requests that attend to all keys, laid out as a step; None if there are no such requests.
        full_rows: indices of the packed rows in ``full_step``, [M]; None if there are no such requests.
        tiles: tiles of the rows that select keys.
        order: index of each packed row in the concatenation of ``full_rows`` and the rows of ``tiles``, [N].
    """

    dims: Dims
    num_rows: int
    limits: Limits
    full_step: StepRows | None
    full_rows: mx.array | None
    tiles: list[Tile]
    order: mx.array
    _attention: dict[Hashable, StepAttention] = field(default_factory=dict)

    def full_attention(self, owner: object, for_step: Callable[[StepRows], StepAttention]) -> StepAttention:
        """Return the attention of ``full_step``. The first call for each ``owner`` creates it with ``for_step``.

        Args:
            owner: attention of the whole step by one backend.
            for_step: function of the same backend that plans a step's attention.
        """
        assert self.full_step is not None
        if id(owner) not in self._attention:
            self._attention[id(owner)] = for_step(self.full_step)
        return self._attention[id(owner)]


@dataclass(frozen=True)
class KeySelection:
    """Keys that the rows of one layer attend to.

    Attributes:
        plan: plan of the step.
        positions: for each tile, positions of the selected keys, [T, R, G, K] int32. G is 1, or the number of KV heads
            if each KV head has its own keys. A position is -1 if a row sees fewer keys.
        sorted_size: number of keys that a row selects. None if the positions of a row may be unsorted. The kernel
            requires sorted positions: they rise, and -1 comes at the end.
    """

    plan: SelectionPlan
    positions: list[mx.array]
    sorted_size: SelectionSize | None = None

    def by_row(self) -> np.ndarray:
        """Return the selected positions of each packed row, [N, G, K] int32. Evaluates the selection.

        -1 stands for no key. Rows of requests that attend to all keys have only -1.
        """
        mx.eval(self.positions)  # raises errors of operations; the conversion to NumPy would not
        shape = self.positions[0].shape[2:]
        found = np.full((self.plan.num_rows, *shape), NOT_SEEN, np.int32)
        for tile, positions in zip(self.plan.tiles, self.positions, strict=True):
            found[np.array(tile.rows)] = np.array(positions).reshape(-1, *shape)
        return found


def plan_selection(rows: StepRows, num_keys: int, dims: Dims, limits: Limits | None = None) -> SelectionPlan | None:
    """Divide a step's rows into rows that select keys and rows that attend to all keys.

    Returns None if no request has more than ``num_keys`` keys, so that all rows attend to all keys.

    Args:
        rows: rows of the step.
        num_keys: number of keys that a row selects.
        dims: dimensions of the index.
        limits: limits of the sizes of tiles; None for the device's defaults.
    """
    is_selecting = rows.seq_lens > num_keys
    if not is_selecting.any():
        return None
    limits = limits or (CPU_LIMITS if computes_on_cpu() else GPU_LIMITS)
    segments = [
        RowSegment(i, int(rows.cu_seqlens_q[i]), int(rows.query_lens[i]), 0, int(rows.seq_lens[i]))
        for i in np.flatnonzero(is_selecting).tolist()
    ]
    small: list[RowSegment] = []
    large: list[RowSegment] = []
    for s in segments:
        (small if s.num_rows == 1 or s.num_rows * s.num_keys <= limits.small_area else large).append(s)
    groups = group_segments(small, dims, limits)
    planned = [
        *(_group(rows, group) for group in groups),
        *(tile for s in large for tile in _tiles(rows, s, num_keys, limits)),
    ]
    full_step, full_rows = None, np.flatnonzero(~is_selecting[rows.request_of_row])
    if len(full_rows):
        full_step = rows.of_requests(np.flatnonzero(~is_selecting))
    places = np.concatenate([full_rows, *(places for places, _ in planned)])
    order = np.empty(rows.num_tokens, np.int32)
    order[places[places >= 0]] = np.flatnonzero(places >= 0)
    uploaded = None if full_step is None else mx.array(full_rows.astype(np.int32))
    tiles = [tile for _, tile in planned]
    return SelectionPlan(dims, rows.num_tokens, limits, full_step, uploaded, tiles, mx.array(order))


_PlannedTile = tuple[np.ndarray, Tile]
"""Index of each row of a tile among the packed rows, [T * R], -1 for padding; and the tile."""


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
    """Yield the tiles of one request with many rows.

    The keys of a tile end with the last key that the tile's last row sees. A tile has at least ``least_keys`` keys.
    """
    keys = _Keys(rows, np.array([segment.request]), np.array([segment.key_end]))
    size = max(1, min(limits.tile_rows, limits.scores // (_SORTED_ARRAYS * segment.num_keys)))
    for lo in range(0, segment.num_rows, size):
        own = np.arange(lo, min(lo + size, segment.num_rows))
        num_keys = max(segment.context_len + int(own[-1]) + 1, least_keys)
        packed = segment.start + own
        yield packed, Tile(packed, segment.context_len + own[None], keys, num_keys, is_group=False)


Common = Callable[[mx.array], mx.array]
"""Function that returns the selection of all ranks, given the positions that this rank has selected."""


AttendTile = Callable[[Tile, mx.array], Iterable[mx.array]]
"""Function of a tile and its selected positions. Returns the output of the tile's rows in parts, [rows, Hq, Dv]."""


def attend_selected(
    selection: KeySelection,
    owner: object,
    for_step: Callable[[StepRows], StepAttention],
    q: mx.array,  # [N, Hq, D]
    state: KVState,
    scale: float,
    attend_tile: AttendTile,
) -> mx.array:  # [N, Hq, Dv], dtype of q; for latents, the latent_dim columns
    """Compute attention of every packed row to its selected keys, or to all keys if its request has few keys.

    Args:
        selection: keys that rows attend to.
        owner: the attention of the step, see :meth:`SelectionPlan.full_attention`.
        for_step: function of the backend that plans a step's attention.
        q: queries.
        state: keys and values, including the rows of this step.
        scale: factor of the scores.
        attend_tile: function that computes the rows of a tile.
    """
    plan = selection.plan
    width = state.spec.latent_dim or state.spec.v_head_dim
    outputs: list[mx.array] = []
    if plan.full_rows is not None:
        full = plan.full_attention(owner, for_step)
        outputs.append(full.attend(q[plan.full_rows], state, scale=scale))
    for tile, positions in zip(plan.tiles, selection.positions, strict=True):
        outputs += attend_tile(tile, positions)
    return mx.concatenate([out[..., :width] for out in outputs])[plan.order]
