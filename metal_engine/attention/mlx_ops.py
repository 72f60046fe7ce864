r"""Variable-length paged attention in plain MLX ops: the oracle of the Metal kernel and the CPU's own path.

A step's rows are cut into *units*, and a unit gathers only keys that some row of it may see:

- a **batch** takes requests with few rows each (decodes, short chunks) as one batched matrix product.
  Requests of similar length share a batch, so that a short one does not pay for a long one beside it;
- a **segment** takes the many rows of one request in query tiles. K and V are gathered once per span of keys,
  for every tile that sees some of it::

        keys     |-- span 0 --|-- span 1 --|-- span 2 --|       . not computed
        tile 0   |############|####\.......|............|       # computed, no mask
        tile 1   |############|########\...|............|       \ computed, with a mask on the edge
        tile 2   |....\#######|############|\...........|       (here a window cuts off keys on the left)

Either way the softmax is online: (maximum, sum, output) per row goes from piece to piece, in float32 and base
2, so memory is bounded by a few pieces of scores however long the context is. Index arithmetic happens on the
host, once per step for each window that the model's layers use; ``attend`` only builds the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionMetadata

LOG2E = 1.0 / math.log(2.0)
MASKED = -1e30  # a score that loses against any real one, yet finite: -inf minus -inf would be NaN
FLOOR = -100.0  # 2^-100 is nothing beside a row's largest weight, 1, and not yet a denormal, which is slow


@dataclass(frozen=True)
class Limits:
    """Sizes that trade speed for memory. Elements are float32 elements of one temporary array."""

    scores: int  # elements of a piece of scores: rows * query heads * keys
    span: int  # elements of gathered K or V
    tile_rows: int  # rows of a segment's query tile
    small_area: int = 16_384  # rows * keys up to which a request with several rows goes into a batch
    batch_slack: int = 2_048  # padding that is cheaper than one more batch, in units of `_cost`
    batch_waste: float = 0.125  # padding of a batch relative to its real work
    min_keys: int = 64  # a piece or span has at least so many keys, whatever the other limits say


# On a CPU a chain of elementwise ops runs several times faster while its arrays stay in the cache, and arrays
# of several MB may be fresh pages from the system every time. A GPU wants more work per launch.
CPU_LIMITS = Limits(scores=384 * 1024, span=1024 * 1024, tile_rows=64)
GPU_LIMITS = Limits(scores=16 << 20, span=8 << 20, tile_rows=256)


@dataclass(frozen=True)
class Dims:
    """What a plan must know of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # the larger of K's and V's


@dataclass(frozen=True)
class Queries:
    """R packed rows of each of T requests. ``rows`` None: they are the rows ``start : start + T * R``."""

    num_requests: int  # T
    num_rows: int  # R
    start: int
    rows: mx.array | None = None  # [T * R]


@dataclass(frozen=True)
class Piece:
    """The scores of ``queries[query]`` against the keys ``lo : hi`` of a span."""

    query: int
    lo: int
    hi: int
    biases: tuple[mx.array, ...]  # 0 or MASKED; each broadcasts to [T, Hkv, R, G, hi - lo]


@dataclass(frozen=True)
class Span:
    """Keys that are gathered at once, and who reads them."""

    slots: mx.array  # [T, Hkv, S] rows of the cache seen as [num_blocks * block_size * Hkv, D]
    pieces: list[Piece]


@dataclass(frozen=True)
class Unit:
    queries: list[Queries]
    spans: list[Span]


@dataclass(frozen=True)
class Work:
    """A step's work for all layers with the same window and dimensions."""

    units: list[Unit]
    order: mx.array | None  # [N] each packed row's place in the units' concatenated output; None: its own
    keys_gathered: int  # per KV head, padding included
    scores_computed: int  # (row, key) pairs per query head, padding included


@dataclass(frozen=True)
class Item:
    """One request: its packed rows and the absolute positions [key_start, key_end) that any of them sees."""

    request: int
    start: int
    num_rows: int
    key_start: int
    key_end: int

    @property
    def num_keys(self) -> int:
        return self.key_end - self.key_start

    @property
    def context_len(self) -> int:
        return self.key_end - self.num_rows


# ------------------------------------------------------------------------------------------- planning (host)


def plan_work(metadata: AttentionMetadata, window: int | None, dims: Dims, limits: Limits) -> Work:
    """Cut a step into units and upload their indices and masks."""
    planner = _Planner(metadata, window, dims, limits)
    small: list[Item] = []
    units: list[Unit] = []
    for item in planner.items():
        if item.num_rows == 1 or item.num_rows * item.num_keys <= limits.small_area:
            small.append(item)
        else:
            units.append(planner.segment(item))
    units += [planner.batch(group) for group in group_items(small, dims, limits)]
    return Work(units, planner.order(), planner.keys_gathered, planner.scores_computed)


def _cost(num_rows: int, num_keys: int) -> int:
    """Cost of one request in a batch: gathering a key takes about as long as scoring it for three rows."""
    return num_keys * (num_rows + 3)


def group_items(items: Iterable[Item], dims: Dims, limits: Limits) -> list[list[Item]]:
    """Batches of similar items: padding them all to the largest rows and keys costs at most
    max(batch_slack, batch_waste * real work), and a batch of short contexts needs only one span."""
    groups: list[list[Item]] = []
    rows = keys = real = 0
    for item in sorted(items, key=lambda i: (-i.num_rows, -i.num_keys, i.request)):
        cost, size = _cost(item.num_rows, item.num_keys), len(groups[-1]) + 1 if groups else 0
        longest = max(keys, item.num_keys)
        waste = size * _cost(rows, longest) - (real + cost)
        if (
            groups
            and waste <= max(limits.batch_slack, limits.batch_waste * (real + cost))
            and size * rows * dims.num_heads * longest <= limits.scores
            and size * dims.num_kv_heads * dims.head_dim * longest <= limits.span
        ):
            groups[-1].append(item)
            keys, real = longest, real + cost
        else:
            groups.append([item])
            rows, keys, real = item.num_rows, item.num_keys, cost
    for group in groups:
        group.sort(key=lambda i: i.start)  # packed order needs no permutation of the output
    return groups


class _Planner:
    """Index arithmetic of one step for one window."""

    def __init__(self, metadata: AttentionMetadata, window: int | None, dims: Dims, limits: Limits) -> None:
        self.metadata = metadata
        self.window = int(metadata.seq_lens.max()) if window is None else window  # no window sees every key
        self.dims = dims
        self.limits = limits
        self.keys_gathered = 0
        self.scores_computed = 0
        self._places: list[np.ndarray] = []  # packed row of each row of output; -1 for padding
        self._edges: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    def items(self) -> list[Item]:
        m = self.metadata
        key_start = np.maximum(m.context_lens - self.window + 1, 0)  # the first row sees furthest back
        columns = (m.cu_seqlens_q[:-1], m.query_lens, key_start, m.seq_lens)
        return [Item(i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=True))]

    def order(self) -> mx.array | None:
        places = np.concatenate(self._places)  # [sum of T * R]
        num_tokens = self.metadata.num_tokens
        if len(places) == num_tokens and (np.diff(places) > 0).all():
            return None
        order = np.empty(num_tokens, np.int32)
        order[places[places >= 0]] = np.flatnonzero(places >= 0)
        return mx.array(order)

    def slots(self, requests: np.ndarray, positions: np.ndarray) -> mx.array:
        """Rows of the head-flattened cache for positions [T, S] of requests [T] -> [T, Hkv, S]."""
        size, heads = self.metadata.block_size, self.dims.num_kv_heads
        blocks = self.metadata.block_table[requests[:, None], positions // size]  # [T, S]
        slots = blocks * size + positions % size
        self.keys_gathered += slots.size
        return mx.array((slots[:, None, :] * heads + np.arange(heads)[:, None]).astype(np.int32))

    def keys_per_span(self, num_requests: int) -> int:
        per_key = num_requests * self.dims.num_kv_heads * self.dims.head_dim
        return max(self.limits.min_keys, self.limits.span // per_key)

    def keys_per_piece(self, num_rows: int) -> int:
        return max(self.limits.min_keys, self.limits.scores // (num_rows * self.dims.num_heads))

    # A batch, T = 3, R = 1. Padded columns repeat the request's last key, so that only the request's own
    # slots are read (what is in others may be NaN, and 0 * NaN is NaN); the mask takes them out.
    #
    #     columns     0 1 2 3 4 5 6 7
    #     request 0   4 5 6 7 8 9 . .      key_start 4 (a window of 6), key_end 10
    #     request 1   0 1 2 3 4 5 6 7      key_end 8
    #     request 2   0 1 2 3 4 . . .      key_end 5

    def batch(self, items: list[Item]) -> Unit:
        num_requests = len(items)
        columns = zip(*((i.request, i.start, i.num_rows, i.key_start, i.key_end) for i in items), strict=True)
        request, start, rows, key_start, key_end = (np.array(c) for c in columns)  # each [T]
        num_rows, num_keys = int(rows.max()), int((key_end - key_start).max())

        row = np.arange(num_rows)
        packed = start[:, None] + np.minimum(row, rows[:, None] - 1)  # [T, R], padding repeats the last row
        place = np.where(row < rows[:, None], packed, -1).ravel()
        self._places.append(place)
        contiguous = bool((place == start[0] + np.arange(place.size)).all())
        picked = None if contiguous else mx.array(packed.ravel().astype(np.int32))
        queries = Queries(num_requests, num_rows, int(start[0]), picked)
        query_pos = ((key_end - rows)[:, None] + row)[:, :, None]  # [T, R, 1]

        step = min(self.keys_per_span(num_requests), self.keys_per_piece(num_requests * num_rows))
        spans = []
        for lo in range(0, num_keys, step):
            columns_here = np.arange(lo, min(lo + step, num_keys))
            key_pos = key_start[:, None] + columns_here  # [T, S]
            key = key_pos[:, None, :]  # [T, 1, S]
            visible = (key <= query_pos) & (key > query_pos - self.window) & (key < key_end[:, None, None])
            biases: tuple[mx.array, ...] = ()
            if not visible.all():
                bias = np.where(visible, np.float32(0), np.float32(MASKED))  # [T, R, S]
                biases = (mx.array(bias[:, None, :, None, :]),)
            slots = self.slots(request, np.minimum(key_pos, key_end[:, None] - 1))
            spans.append(Span(slots, [Piece(0, 0, len(columns_here), biases)]))
            self.scores_computed += visible.size
        return Unit([queries], spans)

    def segment(self, item: Item) -> Unit:
        tile_rows = min(self.limits.tile_rows, item.num_rows)
        piece_keys = self.keys_per_piece(tile_rows)
        span_keys = self.keys_per_span(1)
        tiles = [(r, min(tile_rows, item.num_rows - r)) for r in range(0, item.num_rows, tile_rows)]
        self._places.append(np.arange(item.start, item.start + item.num_rows))

        spans = []
        for start in range(item.key_start, item.key_end, span_keys):
            end = min(start + span_keys, item.key_end)
            pieces = []
            for t, (first_row, num_rows) in enumerate(tiles):
                pos = item.context_len + first_row  # of the tile's first query
                lo, hi = max(start, pos - self.window + 1), min(end, pos + num_rows)
                # Pieces of equal length: a full one and a sliver would cost an extra round of small ops.
                count = -(-(hi - lo) // piece_keys)
                for k in range(count):
                    a, b = (lo + (hi - lo) * j // count for j in (k, k + 1))
                    biases = self.edges(a - pos, b - pos, num_rows, tile_rows, piece_keys)
                    pieces.append(Piece(t, a - start, b - start, biases))
                self.scores_computed += num_rows * max(hi - lo, 0)
            slots = self.slots(np.array([item.request]), np.arange(start, end)[None])
            spans.append(Span(slots, pieces))
        return Unit([Queries(1, rows, item.start + r) for r, rows in tiles], spans)

    # The mask of a segment's piece depends only on where it lies relative to the tile's first query. So all
    # are slices of two small arrays, one per edge (x: masked; columns: key minus the first query's position):
    #
    #     causal   -2 -1  0  1  2         window 2   -2 -1  0  1  2
    #     row 0     .  .  .  x  x                     x  .  .  .  .     row r sees key k
    #     row 1     .  .  .  .  x                     x  x  .  .  .     iff r - window < k <= r

    def edges(self, lo: int, hi: int, num_rows: int, tile_rows: int, piece_keys: int) -> tuple[mx.array, ...]:
        """Biases [num_rows, 1, hi - lo] for keys lo : hi relative to a tile's first query; () if all seen.

        ``tile_rows`` and ``piece_keys`` bound the rows and keys of any piece of the segment.
        """
        if (tile_rows, piece_keys) not in self._edges:
            row = np.arange(tile_rows)[:, None, None]
            column = np.arange(piece_keys + tile_rows)
            causal = np.where(column - piece_keys <= row, np.float32(0), np.float32(MASKED))
            window = np.where(column > row, np.float32(0), np.float32(MASKED))
            self._edges[tile_rows, piece_keys] = mx.array(causal), mx.array(window)
        causal_edge, window_edge = self._edges[tile_rows, piece_keys]
        biases = []
        if hi > 1:  # key 1 is past row 0
            biases.append(causal_edge[:num_rows, :, lo + piece_keys : hi + piece_keys])
        if lo <= num_rows - 1 - self.window:  # before the last row's window
            biases.append(window_edge[:num_rows, :, lo + self.window : hi + self.window])
        return tuple(biases)


# ---------------------------------------------------------------------------------------- computing (device)


class State(NamedTuple):
    """Online softmax over the keys seen so far, for the rows (row, head of the group) of a tile."""

    peak: mx.array  # [T, Hkv, R * G, 1] largest score
    total: mx.array  # [T, Hkv, R * G, 1] sum of 2^(score - peak)
    out: mx.array  # [T, Hkv, R * G, Dv] the same sum over values


def _exp2_coefficients() -> list[float]:
    """Highest power first: 2^f on [-1/2, 1/2] by Chebyshev interpolation of degree 5, relative error 2e-7."""
    nodes = 0.5 * np.cos(np.pi * (np.arange(6) + 0.5) / 6)
    return [float(c) for c in np.polyfit(nodes, 2.0**nodes, 5)]


_EXP2 = _exp2_coefficients()
_ROUND = 1.5 * 2.0**23  # adding it rounds a float32 to an integer, which is then in the low bits


def exp2(x: mx.array, polynomial: bool) -> mx.array:
    """2^x for float32 x in [-126, 126], relative error 3e-7.

    MLX's CPU backend computes exp and power one element at a time (12 and 4 ns each), but add, multiply and
    shift in vectors: the sixteen ops of the polynomial take 2 ns together while the array stays in the cache.
    """
    if not polynomial:
        return mx.power(2.0, x)
    rounded = x + _ROUND
    fraction = x - (rounded - _ROUND)
    p = fraction * _EXP2[0] + _EXP2[1]
    for c in _EXP2[2:]:
        p = p * fraction + c
    # Add the integer part to the exponent field, which starts at bit 23.
    return (p.view(mx.int32) + (rounded.view(mx.int32) << 23)).view(mx.float32)


def _update(state: State | None, scores: mx.array, values: mx.array, on_gpu: bool) -> State:
    """Add a piece: scores [T, Hkv, R * G, L] in base 2, values [T, Hkv, L, Dv]."""
    num_keys = scores.shape[-1]
    peak = mx.max(scores, axis=-1, keepdims=True)
    if state is not None:
        peak = mx.maximum(peak, state.peak)
    # For few elements, sixteen small ops cost more than they save.
    polynomial = not on_gpu and scores.size >= 16_384
    weights = exp2(mx.maximum(scores - peak, FLOOR), polynomial)
    # A product with ones, because a sum along the last axis is not vectorized on a CPU.
    total = (weights.reshape(-1, num_keys) @ mx.ones((num_keys, 1))).reshape(peak.shape)
    out = weights @ values
    if state is not None:
        shrink = mx.power(2.0, mx.maximum(state.peak - peak, FLOOR))
        total, out = state.total * shrink + total, state.out * shrink + out
    return State(peak, total, out)


@dataclass
class MlxOpsPlan:
    """One step's work. Holds index arrays and masks, never a cache: the next write to it must be in place."""

    metadata: AttentionMetadata
    limits: Limits
    on_gpu: bool
    _work: dict[tuple[int | None, Dims], Work] = field(default_factory=dict)

    def work(self, window: int | None, dims: Dims) -> Work:
        key = (window, dims)
        if key not in self._work:
            self._work[key] = plan_work(self.metadata, window, dims, self.limits)
        return self._work[key]

    def attend(
        self,
        q: mx.array,  # [N, Hq, D]
        k_cache: mx.array,  # [num_blocks, block_size, Hkv, D]
        v_cache: mx.array,  # [num_blocks, block_size, Hkv, Dv]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [Hq]
    ) -> mx.array:  # [N, Hq, Dv], dtype of q
        """See :meth:`AttentionPlan.attend`. Builds the graph and evaluates nothing.

        Raises ValueError where shapes disagree with each other or with the step.
        """
        self._validate(q, k_cache, v_cache, window)
        num_heads, head_dim = q.shape[1:]
        num_kv_heads, v_head_dim = k_cache.shape[2], v_cache.shape[3]
        work = self.work(window, Dims(num_heads, num_kv_heads, max(head_dim, v_head_dim)))

        # Base 2: e^s = 2^(s * log2(e)), with the factor folded into q, or into the softcap.
        rows = q.astype(mx.float32) * (scale / softcap if softcap else scale * LOG2E)
        k_rows, v_rows = k_cache.reshape(-1, head_dim), v_cache.reshape(-1, v_head_dim)
        outputs: list[mx.array] = []
        last: list[mx.array] = []  # chains the pieces: evaluated side by side, each would hold its scores
        for unit in work.units:
            tiles = [_load(rows, queries, num_kv_heads) for queries in unit.queries]
            states = [_initial_state(sinks, queries, num_kv_heads) for queries in unit.queries]
            for span in unit.spans:
                slots = _after(span.slots, last)
                keys = k_rows[slots].astype(mx.float32)  # [T, Hkv, S, D]
                values = v_rows[slots].astype(mx.float32)  # [T, Hkv, S, Dv]
                for piece in span.pieces:
                    tile = _after(tiles[piece.query], last)  # [T, Hkv, R * G, D]
                    scores = tile @ keys[:, :, piece.lo : piece.hi].swapaxes(-1, -2)  # [T, Hkv, R * G, L]
                    if softcap:
                        scores = mx.tanh(scores) * (softcap * LOG2E)
                    if piece.biases:
                        by_row = (*scores.shape[:2], unit.queries[piece.query].num_rows, -1, scores.shape[3])
                        bias = sum(piece.biases[1:], piece.biases[0])  # broadcasts to [T, Hkv, R, G, L]
                        scores = (scores.reshape(by_row) + bias).reshape(scores.shape)
                    seen = values[:, :, piece.lo : piece.hi]  # [T, Hkv, L, Dv]
                    state = _update(states[piece.query], scores, seen, self.on_gpu)
                    # The sum too: left for later, it would keep the piece's weights alive until the end.
                    states[piece.query], last = state, [state.out, state.total]
            outputs += [_finish(s, t, num_heads) for s, t in zip(states, unit.queries, strict=True)]
        packed = (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).astype(q.dtype)
        return packed if work.order is None else packed[work.order]

    def _validate(self, q: mx.array, k_cache: mx.array, v_cache: mx.array, window: int | None) -> None:
        if q.shape[0] != self.metadata.num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows, but the step has {self.metadata.num_tokens} tokens")
        if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != q.shape[2]:
            raise ValueError(
                f"q {q.shape}, K cache {k_cache.shape} and V cache {v_cache.shape} do not fit together"
            )
        if k_cache.shape[1] != self.metadata.block_size:
            raise ValueError(f"cache blocks hold {k_cache.shape[1]} tokens, not {self.metadata.block_size}")
        if q.shape[1] % k_cache.shape[2]:
            raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads")
        if k_cache.shape[0] * k_cache.shape[1] * k_cache.shape[2] >= 2**31:
            raise ValueError(f"K cache {k_cache.shape}: (slot, head) indices do not fit 32 bits")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")


def _after(x: mx.array, last: list[mx.array]) -> mx.array:
    return mx.depends([x], last)[0] if last else x


def _load(rows: mx.array, queries: Queries, num_kv_heads: int) -> mx.array:
    """Packed rows [N, Hq, D] -> [T, Hkv, R * G, D]: a group's query heads become rows that share K and V."""
    t, r = queries.num_requests, queries.num_rows
    picked = rows[queries.start : queries.start + t * r] if queries.rows is None else rows[queries.rows]
    split = picked.reshape(t, r, num_kv_heads, -1, rows.shape[-1])  # [T, R, Hkv, G, D]
    return split.swapaxes(1, 2).reshape(t, num_kv_heads, -1, rows.shape[-1])


def _initial_state(sinks: mx.array | None, queries: Queries, num_kv_heads: int) -> State | None:
    """A sink is a key seen before all others, with a value of zero."""
    if sinks is None:
        return None
    t, r, group = queries.num_requests, queries.num_rows, sinks.size // num_kv_heads
    peak = (sinks.astype(mx.float32) * LOG2E).reshape(num_kv_heads, 1, group)
    peak = mx.broadcast_to(peak, (t, num_kv_heads, r, group)).reshape(t, num_kv_heads, r * group, 1)
    return State(peak, mx.ones_like(peak), mx.zeros((1, 1, 1, 1)))


def _finish(state: State | None, queries: Queries, num_heads: int) -> mx.array:
    """-> [T * R, Hq, Dv]"""
    assert state is not None  # every row sees at least its own key
    out = state.out / state.total  # [T, Hkv, R * G, Dv]
    t, num_kv_heads, _, v_head_dim = out.shape
    split = out.reshape(t, num_kv_heads, queries.num_rows, -1, v_head_dim)
    return split.swapaxes(1, 2).reshape(-1, num_heads, v_head_dim)


class MlxOpsBackend:
    """The portable backend, see the module's docstring. Runs wherever MLX does."""

    name = "mlx"

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits

    def plan(self, metadata: AttentionMetadata) -> MlxOpsPlan:
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        return MlxOpsPlan(metadata, self._limits or (GPU_LIMITS if on_gpu else CPU_LIMITS), on_gpu)
