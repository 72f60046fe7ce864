r"""Plans the portable backend's work in a step on the host: the keys for each row, and the tiles of rows and keys.

A step's rows are divided into *units*. A unit gathers only keys that one of its rows may see:

- A **group** of requests with few rows each (decodes, short chunks) is one batched matrix product. Requests of similar
  length share a group, so that a short request is not padded to a long one. On a CPU, two streams share the decodes'
  groups if there are many keys to gather.
- A **long segment**, many rows of one request, is processed in query tiles. K and V are gathered once per span of keys,
  for every tile that sees some of it::

        keys     |-- span 0 --|-- span 1 --|-- span 2 --|       . not computed
        tile 0   |############|####\.......|............|       # computed, no mask
        tile 1   |############|########\...|............|       \ computed, with a mask on the edge
        tile 2   |....\#######|############|\...........|       (here a window cuts off keys on the left)

- **Decodes over runs**: on a CPU, a request with one row and many keys reads keys in consecutive slots directly from
  the cache, without gathering them.

A segment is first cut where a chunk of the context begins, if the layer attends within chunks. An image
whose tokens attend to each other is a segment of its own: each row sees all keys up to the end of the segment.

The index arithmetic is done once per step for each window and each chunk size of the model's layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import mlx.core as mx
import numpy as np

from metal_engine.attention.portable.groups import Dims, Limits, RowSegment, group_segments, in_lanes
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.writes import consecutive_runs

# A product over a run treats all KV heads of a token as one row, and pads queries with zeros. With more KV heads than
# this, the zeros cost too much.
MAX_RUN_HEADS = 16
MASKED = -1e30  # a score below any real score, but finite: -inf minus -inf would be NaN


@dataclass(frozen=True)
class Queries:
    """R packed rows of each of T requests. If ``rows`` is None, they are the rows ``start : start + T * R``."""

    num_requests: int  # T
    num_rows: int  # R
    start: int
    rows: mx.array | None = None  # [T * R]

    def of(self, packed: mx.array, num_kv_heads: int) -> mx.array:
        """Select packed rows, [N, Hq, D] -> [T, Hkv, R * G, D]. The G query heads of a KV head become G rows."""
        t, r = self.num_requests, self.num_rows
        picked = packed[self.start : self.start + t * r] if self.rows is None else packed[self.rows]
        split = picked.reshape(t, r, num_kv_heads, -1, packed.shape[-1])  # [T, R, Hkv, G, D]
        return split.swapaxes(1, 2).reshape(t, num_kv_heads, -1, packed.shape[-1])


@dataclass(frozen=True)
class ScoreTile:
    """Scores of ``queries[query]`` for the keys ``lo : hi`` of a span."""

    query: int
    lo: int
    hi: int
    biases: tuple[mx.array, ...]  # 0 or MASKED; each broadcasts to [T, Hkv, R, G, hi - lo]


@dataclass(frozen=True)
class Span:
    """Keys that are gathered at once, and the tiles that read them."""

    head_rows: mx.array  # [T, Hkv, S] slot * Hkv + head: argument of KVState.read_heads
    tiles: list[ScoreTile]


@dataclass(frozen=True)
class Unit:
    """Query rows, and the spans of keys that they attend to (see the module's docstring)."""

    queries: list[Queries]
    spans: list[Span]
    lane: int = 0  # 1: computed on the second stream


@dataclass(frozen=True)
class RunDecodes:
    """One row of each of T requests. Most keys of a request form a run of consecutive slots."""

    queries: Queries
    runs: list[list[tuple[int, int]]]  # [T] parts of the run, of limited size: first slot, number of keys
    rest: mx.array | None  # [T, S] slots of the other keys; None if there are no other keys
    bias: mx.array | None  # [T, 1, S] 0 or MASKED, because requests have different numbers of other keys
    own_heads: mx.array  # [Hkv, 1, Hkv, 1] 1 if the query's KV head is the key's, else 0


@dataclass(frozen=True)
class Work:
    """Work of a step for all layers with the same window, chunk size and dimensions.

    The outputs are concatenated in this order: ``units``, then ``run_decodes``.
    """

    units: list[Unit]
    run_decodes: list[RunDecodes]
    order: mx.array | None  # [N] index of each packed row in the concatenated outputs; None if in packed order
    keys_gathered: int  # keys per KV head, with padding
    scores_computed: int  # (row, key) pairs per query head, with padding


@dataclass(frozen=True)
class SlotRun:
    """Longest sequence of a decode's keys in consecutive slots, as a range of positions."""

    segment: RowSegment
    start: int
    end: int

    @property
    def num_rest(self) -> int:
        return self.segment.num_keys - (self.end - self.start)

    def remainder(self) -> np.ndarray:
        """Return the positions of the request's other keys, [num_rest]."""
        before = np.arange(self.segment.key_start, self.start)
        return np.concatenate([before, np.arange(self.end, self.segment.key_end)])


def plan_work(rows: StepRows, window: int | None, dims: Dims, limits: Limits, chunk: int | None = None) -> Work:
    """Divide a step into units and upload their indices and masks, for layers with this window, chunk size and dims."""
    planner = _Planner(rows, window, dims, limits, chunk)
    small: list[RowSegment] = []
    runs: list[SlotRun] = []
    units: list[Unit] = []
    for segment in planner.segments():
        run = planner.run(segment)
        if run is not None:
            runs.append(run)
        elif segment.num_rows == 1 or segment.num_rows * segment.num_keys <= limits.small_area:
            small.append(segment)
        else:
            units.append(planner.tiled(segment))
    groups = in_lanes(group_segments(small, dims, limits), dims, limits)
    units += [replace(planner.grouped(group), lane=lane) for lane, group in groups]
    run_decodes = planner.run_decodes(runs)
    return Work(units, run_decodes, planner.order(), planner.keys_gathered, planner.scores_computed)


class _Planner:
    """Index arithmetic of one step for one window, or for one size of chunks.

    Methods that return units also record the place of the unit's outputs, for :meth:`order`. Call them in the order of
    the outputs.
    """

    def __init__(self, rows: StepRows, window: int | None, dims: Dims, limits: Limits, chunk: int | None) -> None:
        self.rows = rows
        self.chunk = chunk
        self.spans = rows.spans_of_layer(window)  # [S, 2], rows that attend to each other
        if chunk is not None and self.spans is not None:
            raise ValueError("images whose tokens attend to each other are not supported within chunks of the context")
        self.window = int(rows.seq_lens.max()) if window is None else window  # without a window, all keys are visible
        self.dims = dims
        self.limits = limits
        self.keys_gathered = 0
        self.scores_computed = 0
        self._places: list[np.ndarray] = []  # packed row of each row of output; -1 for padding
        self._edges: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    def segments(self) -> list[RowSegment]:
        rows = self.rows
        key_start = np.maximum(rows.context_lens - self.window + 1, 0)  # the first row sees the earliest keys
        columns = (rows.cu_seqlens_q[:-1], rows.query_lens, key_start, rows.seq_lens)
        segments = [RowSegment(i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=True))]
        if self.chunk is not None:
            return [part for whole in segments for part in self._by_chunk(whole)]
        return segments if self.spans is None else [part for whole in segments for part in self._by_image(whole)]

    def _by_image(self, segment: RowSegment) -> list[RowSegment]:
        """Cut a segment around its images whose tokens attend to each other."""
        assert self.spans is not None
        end = segment.start + segment.num_rows
        own = self.spans[(self.spans[:, 0] >= segment.start) & (self.spans[:, 1] <= end)]
        cuts = [segment.start, *own.ravel().tolist(), end]
        position = segment.context_len - segment.start  # of row 0 of the step
        return [
            RowSegment(
                segment.request, lo, hi - lo, max(lo + position - self.window + 1, 0), hi + position, bool(i % 2)
            )
            for i, (lo, hi) in enumerate(pairwise(cuts))
            if lo < hi
        ]

    def _by_chunk(self, segment: RowSegment) -> list[RowSegment]:
        """Cut a segment where a chunk of the context begins. The rows of a part see no key before their chunk."""
        assert self.chunk is not None
        first, end = segment.context_len, segment.key_end
        cuts = [first, *range((first // self.chunk + 1) * self.chunk, end, self.chunk), end]
        return [
            RowSegment(
                segment.request, segment.start + lo - first, hi - lo, max(segment.key_start, lo - lo % self.chunk), hi
            )
            for lo, hi in pairwise(cuts)
        ]

    def order(self) -> mx.array | None:
        places = np.concatenate(self._places)  # [sum of T * R]
        num_tokens = self.rows.num_tokens
        if len(places) == num_tokens and (np.diff(places) > 0).all():
            return None
        order = np.empty(num_tokens, np.int32)
        order[places[places >= 0]] = np.flatnonzero(places >= 0)
        return mx.array(order)

    def head_rows(self, requests: np.ndarray, positions: np.ndarray) -> mx.array:
        """Return the indices that gather positions [T, S] of requests [T] for every KV head: [T, Hkv, S] int32."""
        heads = self.dims.num_kv_heads
        slots = self.rows.slots(requests[:, None], positions)  # [T, S]
        self.keys_gathered += slots.size
        return mx.array((slots[:, None, :] * heads + np.arange(heads)[:, None]).astype(np.int32))

    def keys_per_span(self, num_requests: int) -> int:
        per_key = num_requests * self.dims.num_kv_heads * self.dims.head_dim
        return max(self.limits.min_keys, self.limits.span // per_key)

    def keys_per_tile(self, num_rows: int) -> int:
        return max(self.limits.min_keys, self.limits.scores // (num_rows * self.dims.num_heads))

    # A group, T = 3, R = 1. Padded columns repeat the request's last key, so that only the request's own slots are
    # read. Other slots may contain NaN, and 0 * NaN is NaN. The mask removes the padded columns.
    #
    #     columns     0 1 2 3 4 5 6 7
    #     request 0   4 5 6 7 8 9 . .      key_start 4 (a window of 6), key_end 10
    #     request 1   0 1 2 3 4 5 6 7      key_end 8
    #     request 2   0 1 2 3 4 . . .      key_end 5

    def grouped(self, segments: list[RowSegment]) -> Unit:
        """Return a unit of several requests with few rows each."""
        num_requests = len(segments)
        fields = ((s.request, s.start, s.num_rows, s.key_start, s.key_end, s.is_bidirectional) for s in segments)
        request, start, rows, key_start, key_end, is_bidirectional = map(
            np.array, zip(*fields, strict=True)
        )  # each [T]
        num_rows, num_keys = int(rows.max()), int((key_end - key_start).max())

        row = np.arange(num_rows)
        packed = start[:, None] + np.minimum(row, rows[:, None] - 1)  # [T, R], padding repeats the last row
        place = np.where(row < rows[:, None], packed, -1).ravel()
        self._places.append(place)
        contiguous = bool((place == start[0] + np.arange(place.size)).all())
        picked = None if contiguous else mx.array(packed.ravel().astype(np.int32))
        queries = Queries(num_requests, num_rows, int(start[0]), picked)
        query_pos = ((key_end - rows)[:, None] + row)[:, :, None]  # [T, R, 1]
        last_seen = np.where(is_bidirectional[:, None, None], key_end[:, None, None] - 1, query_pos)  # [T, R, 1]

        step = min(self.keys_per_span(num_requests), self.keys_per_tile(num_requests * num_rows))
        spans = []
        for lo in range(0, num_keys, step):
            columns_here = np.arange(lo, min(lo + step, num_keys))
            key_pos = key_start[:, None] + columns_here  # [T, S]
            key = key_pos[:, None, :]  # [T, 1, S]
            visible = (key <= last_seen) & (key > query_pos - self.window) & (key < key_end[:, None, None])
            biases: tuple[mx.array, ...] = ()
            if not visible.all():
                bias = np.where(visible, np.float32(0), np.float32(MASKED))  # [T, R, S]
                biases = (mx.array(bias[:, None, :, None, :]),)
            head_rows = self.head_rows(request, np.minimum(key_pos, key_end[:, None] - 1))
            spans.append(Span(head_rows, [ScoreTile(0, 0, len(columns_here), biases)]))
            self.scores_computed += visible.size
        return Unit([queries], spans)

    def run(self, segment: RowSegment) -> SlotRun | None:
        """Return the run of slots that a decode reads directly, or None.

        The run must have at least ``run_keys`` keys and half of the decode's keys. The other keys must fit one span.
        """
        least = self.limits.run_keys
        if least is None or segment.num_rows > 1 or segment.num_keys < least or self.dims.num_kv_heads > MAX_RUN_HEADS:
            return None
        size = self.rows.block_size
        first = segment.key_start // size
        blocks = self.rows.block_table[segment.request, first : -(-segment.key_end // size)]
        begin, count, _ = max(consecutive_runs(blocks).tolist(), key=lambda run: run[1])
        start = max((first + begin) * size, segment.key_start)
        end = min((first + begin + count) * size, segment.key_end)
        is_long = end - start >= max(least, segment.num_keys / 2)
        # The other keys are gathered at once.
        is_rest_small = segment.num_keys - (end - start) <= self.keys_per_span(1)
        return SlotRun(segment, start, end) if is_long and is_rest_small else None

    def run_decodes(self, runs: list[SlotRun]) -> list[RunDecodes]:
        """Return decodes over runs. Requests with similar numbers of other keys are gathered together."""
        by_start = {run.segment.start: run for run in runs}
        others = [RowSegment(r.segment.request, r.segment.start, 1, 0, r.num_rest) for r in runs]
        return [
            self._run_decodes([by_start[segment.start] for segment in group])
            for group in group_segments(others, self.dims, self.limits)
        ]

    def _run_decodes(self, runs: list[SlotRun]) -> RunDecodes:
        most = self.keys_per_span(1)
        start = np.array([run.segment.start for run in runs], np.int32)
        self._places.append(start)
        contiguous = bool((np.diff(start) == 1).all())
        queries = Queries(len(runs), 1, int(start[0]), None if contiguous else mx.array(start))
        parts = [
            [
                (int(self.rows.slots(run.segment.request, lo)), min(most, run.end - lo))
                for lo in range(run.start, run.end, most)
            ]
            for run in runs
        ]
        rests = [run.remainder() for run in runs]
        num_rest = max(map(len, rests))
        self.keys_gathered += len(runs) * num_rest
        self.scores_computed += sum(r.end - r.start for r in runs) + len(runs) * num_rest
        rest = bias = None
        if num_rest:
            # Padding repeats the request's last key, as in `grouped`.
            positions = np.stack(
                [
                    np.pad(p, (0, num_rest - len(p)), constant_values=r.segment.key_end - 1)
                    for p, r in zip(rests, runs, strict=True)
                ]
            )
            requests = np.array([run.segment.request for run in runs])
            rest = mx.array(self.rows.slots(requests[:, None], positions).astype(np.int32))
            is_padding = np.arange(num_rest) >= np.array([[len(p)] for p in rests])  # [T, S]
            if is_padding.any():
                bias = mx.array(np.where(is_padding, np.float32(MASKED), np.float32(0))[:, None])
        own_heads = mx.eye(self.dims.num_kv_heads)[:, None, :, None]
        return RunDecodes(queries, parts, rest, bias, own_heads)

    def tiled(self, segment: RowSegment) -> Unit:
        """Return a unit of one request with many rows."""
        tile_rows = min(self.limits.tile_rows, segment.num_rows)
        tile_keys = self.keys_per_tile(tile_rows)
        span_keys = self.keys_per_span(1)
        tiles = [(r, min(tile_rows, segment.num_rows - r)) for r in range(0, segment.num_rows, tile_rows)]
        self._places.append(np.arange(segment.start, segment.start + segment.num_rows))

        spans = []
        for start in range(segment.key_start, segment.key_end, span_keys):
            end = min(start + span_keys, segment.key_end)
            score_tiles = []
            for t, (first_row, num_rows) in enumerate(tiles):
                pos = segment.context_len + first_row  # position of the tile's first query
                lo = max(start, pos - self.window + 1)
                hi = end if segment.is_bidirectional else min(end, pos + num_rows)
                # Tiles of equal length: a full tile and a small remainder would cost an extra round of operations.
                count = -(-(hi - lo) // tile_keys)
                for k in range(count):
                    a, b = (lo + (hi - lo) * j // count for j in (k, k + 1))
                    is_causal = not segment.is_bidirectional
                    biases = self.edges(a - pos, b - pos, num_rows, tile_rows, tile_keys, is_causal=is_causal)
                    score_tiles.append(ScoreTile(t, a - start, b - start, biases))
                self.scores_computed += num_rows * max(hi - lo, 0)
            head_rows = self.head_rows(np.array([segment.request]), np.arange(start, end)[None])
            spans.append(Span(head_rows, score_tiles))
        return Unit([Queries(1, rows, segment.start + r) for r, rows in tiles], spans)

    # The mask of a score tile depends only on its position relative to the first query. All masks are therefore slices
    # of two small arrays, one per edge (x: masked; columns: key minus the first query's position):
    #
    #     causal   -2 -1  0  1  2         window 2   -2 -1  0  1  2
    #     row 0     .  .  .  x  x                     x  .  .  .  .     row r sees key k
    #     row 1     .  .  .  .  x                     x  x  .  .  .     iff r - window < k <= r

    def edges(
        self, lo: int, hi: int, num_rows: int, tile_rows: int, tile_keys: int, *, is_causal: bool
    ) -> tuple[mx.array, ...]:
        """Return biases, [num_rows, 1, hi - lo] each, for a score tile; () if every row sees every key.

        Args:
            lo: first key, as a position relative to the tile's first query.
            hi: end of the keys, as a position relative to the tile's first query.
            num_rows: rows of the tile.
            tile_rows: maximum rows of the segment's tiles.
            tile_keys: maximum keys of the segment's tiles.
            is_causal: False if the rows also see later keys.
        """
        if (tile_rows, tile_keys) not in self._edges:
            row = np.arange(tile_rows)[:, None, None]
            column = np.arange(tile_keys + tile_rows)
            causal = np.where(column - tile_keys <= row, np.float32(0), np.float32(MASKED))
            window = np.where(column > row, np.float32(0), np.float32(MASKED))
            self._edges[tile_rows, tile_keys] = mx.array(causal), mx.array(window)
        causal_edge, window_edge = self._edges[tile_rows, tile_keys]
        biases = []
        if is_causal and hi > 1:  # key 1 is past row 0
            biases.append(causal_edge[:num_rows, :, lo + tile_keys : hi + tile_keys])
        if lo <= num_rows - 1 - self.window:  # before the last row's window
            biases.append(window_edge[:num_rows, :, lo + self.window : hi + self.window])
        return tuple(biases)
