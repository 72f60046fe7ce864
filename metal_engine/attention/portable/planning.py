r"""What `mlx_ops` does in a step, planned on the host: which rows meet which keys, and in what pieces.

A step's rows are cut into *units*, and a unit gathers only keys that some row of it may see:

- a **batch** takes requests with few rows each (decodes, short chunks) as one batched matrix product.
  Requests of similar length share a batch, so that a short one does not pay for a long one beside it. On a CPU,
  two streams share the decodes' batches where there is much to gather;
- a **segment** takes the many rows of one request in query tiles. K and V are gathered once per span of keys,
  for every tile that sees some of it::

        keys     |-- span 0 --|-- span 1 --|-- span 2 --|       . not computed
        tile 0   |############|####\.......|............|       # computed, no mask
        tile 1   |############|########\...|............|       \ computed, with a mask on the edge
        tile 2   |....\#######|############|\...........|       (here a window cuts off keys on the left)

- **decodes over runs**: on a CPU, a request with one row and many keys reads those that lie in consecutive slots
  where they are, without gathering them.

The index arithmetic happens once per step for each window that the model's layers use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionMetadata, consecutive_runs
from metal_engine.attention.portable.groups import Dims, Item, Limits, group_items, in_lanes

# A run is multiplied with all KV heads as one row and queries padded with zeros: for many heads that is too much work.
MAX_RUN_HEADS = 16
MASKED = -1e30  # a score that loses against any real one, yet finite: -inf minus -inf would be NaN


@dataclass(frozen=True)
class Queries:
    """R packed rows of each of T requests. ``rows`` None: they are the rows ``start : start + T * R``."""

    num_requests: int  # T
    num_rows: int  # R
    start: int
    rows: mx.array | None = None  # [T * R]

    def of(self, packed: mx.array, num_kv_heads: int) -> mx.array:
        """Packed rows [N, Hq, D] -> [T, Hkv, R * G, D]: a group's query heads become rows that share K and V."""
        t, r = self.num_requests, self.num_rows
        picked = packed[self.start : self.start + t * r] if self.rows is None else packed[self.rows]
        split = picked.reshape(t, r, num_kv_heads, -1, packed.shape[-1])  # [T, R, Hkv, G, D]
        return split.swapaxes(1, 2).reshape(t, num_kv_heads, -1, packed.shape[-1])


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
    lane: int = 0  # 1: on a stream beside the thread's own


@dataclass(frozen=True)
class RunDecodes:
    """One row of each of T requests. Most of a request's keys are a run: they have consecutive slots."""

    queries: Queries
    runs: list[list[tuple[int, int]]]  # [T] a run's pieces: first slot, number of keys
    rest: mx.array | None  # [T, S] slots of the other keys; None: there are none
    bias: mx.array | None  # [T, 1, S] 0 or MASKED: requests have different numbers of them
    own_heads: mx.array  # [Hkv, 1, Hkv, 1] 1 where a query's KV head is a key's, else 0


@dataclass(frozen=True)
class Work:
    """A step's work for all layers with the same window and dimensions. Output is in the order of the lists."""

    units: list[Unit]
    run_decodes: list[RunDecodes]
    order: mx.array | None  # [N] each packed row's place in the units' concatenated output; None: its own
    keys_gathered: int  # per KV head, padding included
    scores_computed: int  # (row, key) pairs per query head, padding included


@dataclass(frozen=True)
class Run:
    """The most keys of a decode that have consecutive slots, by their positions."""

    item: Item
    start: int
    end: int

    @property
    def num_rest(self) -> int:
        return self.item.num_keys - (self.end - self.start)

    def rest(self) -> np.ndarray:
        """Positions of the request's other keys, [num_rest]."""
        before = np.arange(self.item.key_start, self.start)
        return np.concatenate([before, np.arange(self.end, self.item.key_end)])


def plan_work(metadata: AttentionMetadata, window: int | None, dims: Dims, limits: Limits) -> Work:
    """Cut a step into units and upload their indices and masks."""
    planner = _Planner(metadata, window, dims, limits)
    small: list[Item] = []
    runs: list[Run] = []
    units: list[Unit] = []
    for item in planner.items():
        run = planner.run(item)
        if run is not None:
            runs.append(run)
        elif item.num_rows == 1 or item.num_rows * item.num_keys <= limits.small_area:
            small.append(item)
        else:
            units.append(planner.segment(item))
    groups = in_lanes(group_items(small, dims, limits), dims, limits)
    units += [replace(planner.batch(group), lane=lane) for lane, group in groups]
    run_decodes = planner.run_decodes(runs)
    return Work(units, run_decodes, planner.order(), planner.keys_gathered, planner.scores_computed)


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

    def run(self, item: Item) -> Run | None:
        """The keys that a decode is to read in place, if there are enough of them: half of its keys or more."""
        least = self.limits.run_keys
        if (
            least is None
            or item.num_rows > 1
            or item.num_keys < least
            or self.dims.num_kv_heads > MAX_RUN_HEADS
        ):
            return None
        size = self.metadata.block_size
        first = item.key_start // size
        blocks = self.metadata.block_table[item.request, first : -(-item.key_end // size)]
        begin, count, _ = max(consecutive_runs(blocks).tolist(), key=lambda run: run[1])
        start = max((first + begin) * size, item.key_start)
        end = min((first + begin + count) * size, item.key_end)
        is_long = end - start >= max(least, item.num_keys / 2)
        # The other keys are gathered at once.
        return (
            Run(item, start, end)
            if is_long and item.num_keys - (end - start) <= self.keys_per_span(1)
            else None
        )

    def run_decodes(self, runs: list[Run]) -> list[RunDecodes]:
        """Requests whose other keys are about as many share their gather."""
        by_start = {run.item.start: run for run in runs}
        others = [Item(r.item.request, r.item.start, 1, 0, r.num_rest) for r in runs]
        return [
            self._run_decodes([by_start[item.start] for item in group])
            for group in group_items(others, self.dims, self.limits)
        ]

    def _run_decodes(self, runs: list[Run]) -> RunDecodes:
        size, table, most = self.metadata.block_size, self.metadata.block_table, self.keys_per_span(1)
        start = np.array([run.item.start for run in runs], np.int32)
        self._places.append(start)
        contiguous = bool((np.diff(start) == 1).all())
        queries = Queries(len(runs), 1, int(start[0]), None if contiguous else mx.array(start))
        pieces = [
            [
                (int(table[run.item.request, lo // size]) * size + lo % size, min(most, run.end - lo))
                for lo in range(run.start, run.end, most)
            ]
            for run in runs
        ]
        rests = [run.rest() for run in runs]
        num_rest = max(map(len, rests))
        self.keys_gathered += len(runs) * num_rest
        self.scores_computed += sum(r.end - r.start for r in runs) + len(runs) * num_rest
        rest = bias = None
        if num_rest:
            # Padding repeats the request's last key, see above.
            positions = np.stack(
                [
                    np.pad(p, (0, num_rest - len(p)), constant_values=r.item.key_end - 1)
                    for p, r in zip(rests, runs, strict=True)
                ]
            )
            requests = np.array([run.item.request for run in runs])
            rest = mx.array(
                (table[requests[:, None], positions // size] * size + positions % size).astype(np.int32)
            )
            is_padding = np.arange(num_rest) >= np.array([[len(p)] for p in rests])  # [T, S]
            if is_padding.any():
                bias = mx.array(np.where(is_padding, np.float32(MASKED), np.float32(0))[:, None])
        own_heads = mx.eye(self.dims.num_kv_heads)[:, None, :, None]
        return RunDecodes(queries, pieces, rest, bias, own_heads)

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
