"""Divides a step into the kernel's work items: pure NumPy, done once per step.

Example: a mixed batch with 2 query heads per KV head, and tiles of 8 rows (4 tokens). The last column has the item's
keys. A tile is full if its request has enough rows, even if it ends between the heads of a token::

    request 0  fresh, 6 tokens     [t0 t1 t2 t3]                  keys 0 .. 3
                                   [t4 t5]                        keys 0 .. 5
    request 1  chunk of 3, at 9    [t6 t7 t8]                     keys 0 .. 11
    request 2  decode, at 5,000    [t9]                           keys 0 .. 447        split, merged afterwards
                                   [t9]                           keys 448 .. 959
                                   ...
                                   [t9]                           keys 4,544 .. 5,000

Every item runs once per KV head. A decode is an item with one token, alone or in a larger batch.

The kernel processes keys in *stages* of ``key_step``. A tile's splits divide its stages evenly::

    1,030 keys, stages of 64       |00|000|000|000|000|00.|       6 splits of 2 or 3 stages; the last stage has 6 keys

The number of splits of a tile depends only on the tile's request and on the device. Other requests in the batch have no
influence, so the results of a request are bitwise the same in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metal_engine.kv_cache.rows import StepRows

# Fields of an item in the kernel's table (paged_attention.metal): first row, number of rows, position of the first row,
# first key, end of the keys, request, first partial row or -1. ITEM_FIELDS reaches the kernel as a template argument.
# A row is (packed token) * group + (query head of the group), so a tile may begin and end within a token.
ITEM_FIELDS = 7
# If rows of images attend to later rows, an item has one more field: the end of the rows' image, or 0 for rows of text.
# Rows of an image and rows of text are in different items.
IMAGE_ITEM_FIELDS = 8

# Minimum keys of a tile that is split. Fewer keys are not worth the merge, which is one more launch per layer.
MIN_KEYS_TO_SPLIT = 512
# A split writes its rows' outputs in float32, and the merge reads them. Per row, this is as much data as K and V of 2
# keys in half precision. That is a sixteenth of the K and V that a split with KEYS_PER_ROW keys per row reads,
# and an eighth for 16 rows and SHORT_ENOUGH_KEYS. With more rows, the fraction grows.
# The shortest split has KEYS_PER_ROW keys per row, but at least MIN_SPLIT_KEYS, because fewer are not worth a
# threadgroup, and at most SHORT_ENOUGH_KEYS, because computation dominates the time of a split with many rows.
KEYS_PER_ROW = 32
MIN_SPLIT_KEYS = 128
SHORT_ENOUGH_KEYS = 256
# A request is split only if that shortens its longest item to at most this fraction.
WORTH_MERGING = 0.75
# Maximum splits of a tile, which a thread of the merge reads in sequence. Reaches the merge as a template argument.
MAX_SPLITS = 128


@dataclass(frozen=True)
class WorkItems:
    """Work of a step for layers of one kind (see the module's docstring)."""

    table: np.ndarray  # [num_items, ITEM_FIELDS] int32, or IMAGE_ITEM_FIELDS
    rows: np.ndarray  # [N * group, 3] int32, for the merge: first partial row, splits, partial rows between splits
    num_partial_rows: int

    @property
    def is_split(self) -> bool:
        return self.num_partial_rows > 0


def plan_work_items(
    step: StepRows,
    *,
    group: int,
    num_kv_heads: int,
    window: int | None,
    chunk: int | None,
    target_threadgroups: int,
    key_step: int,
    tile_rows: int,
) -> WorkItems:
    """Plan the work items of a step.

    Args:
        step: rows of the step.
        group: query heads per KV head.
        num_kv_heads: number of KV heads.
        window: sliding window in tokens, or None.
        chunk: size in tokens of the chunks within which the layer attends, or None.
        target_threadgroups: approximate number of threadgroups into which a request is split, if the splits stay long
            enough.
        key_step: keys of a stage. The distance from a tile's first key to the start of a split is a multiple of this.
        tile_rows: maximum rows of an item.
    """
    tiles, begins = _cut_tiles(step, group, tile_rows, window, chunk)
    keys = tiles[:, 4] - tiles[:, 3]  # [T], as all arrays below except `work`
    splittable = keys >= MIN_KEYS_TO_SPLIT
    if not splittable.any():
        return WorkItems(_longest_first(tiles), np.zeros((step.num_tokens * group, 3), np.int32), 0)

    stages = (keys + (key_step - 1)) // key_step
    # A request's tiles share the device as if the request were alone: each tile gets its part of the target.
    work = np.add.reduceat(stages, begins, dtype=np.int64) * num_kv_heads  # [B]
    fair = stages * np.int64(target_threadgroups) // work.take(tiles[:, 5])
    # A split has at least two stages. Only the last stage of a tile may be incomplete. The last split of a tile is
    # therefore at least half as long as the other splits.
    shortest = np.minimum(tiles[:, 1] * KEYS_PER_ROW, SHORT_ENOUGH_KEYS)
    shortest = np.maximum(shortest, max(MIN_SPLIT_KEYS, 2 * key_step))
    worth = stages // ((shortest + (key_step - 1)) // key_step)
    most = np.maximum(1, np.minimum(np.minimum(fair, worth), MAX_SPLITS) * splittable)
    # A tile is done when its longest split is done. Use the smallest number of splits with the same longest split.
    longest = -(-stages // most)
    if len(begins) < len(tiles):
        # A request is done when its longest item is done. A tile that stays whole may be nearly as long.
        before, after = (np.maximum.reduceat(lengths, begins).take(tiles[:, 5]) for lengths in (stages, longest))
        longest = np.where(after <= before * WORTH_MERGING, longest, stages)
    return _split_tiles(tiles, stages, -(-stages // longest), key_step)


def _cut_tiles(
    step: StepRows, group: int, tile_rows: int, window: int | None, chunk: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the item of each tile before splitting, in row order, and the index of each request's first item.

    Returns:
        Items, [T, ITEM_FIELDS] int32, or [T, IMAGE_ITEM_FIELDS] if rows of images attend to later rows; and indices,
        [B].
    """
    spans = step.spans_of_layer(window)
    if chunk is not None and spans is not None:
        raise ValueError("images whose tokens attend to each other are not supported within chunks of the context")
    if step.num_tokens == step.num_requests and group <= tile_rows:  # only single rows, one tile each
        tokens = begins = np.arange(step.num_tokens)
        first_rows = tokens * group
        last_tokens = tokens
    else:
        starts, lengths = step.cu_seqlens_q[:-1], step.query_lens
        if chunk is not None or spans is not None:
            starts, lengths = _cut_requests(step, chunk, spans)
        counts = -(-lengths * group // tile_rows)
        begins = counts.cumsum() - counts
        first_rows = (starts * group - begins * tile_rows).repeat(counts)
        first_rows += np.arange(len(first_rows)) * tile_rows
        if len(starts) > step.num_requests:
            begins = begins[starts.searchsorted(step.cu_seqlens_q[:-1])]
        tokens = first_rows // group
        last_tokens = (np.append(first_rows[1:], step.num_tokens * group) - 1) // group
    positions = step.positions.take(tokens)
    tiles = np.empty((len(tokens), ITEM_FIELDS if spans is None else IMAGE_ITEM_FIELDS), np.int32)
    tiles[:, 0] = first_rows
    tiles[:-1, 1] = first_rows[1:]  # a tile ends where the next tile begins
    tiles[-1, 1] = step.num_tokens * group
    tiles[:, 1] -= tiles[:, 0]
    tiles[:, 2] = positions
    tiles[:, 3] = 0 if window is None else np.maximum(0, positions - (window - 1))
    if chunk is not None:
        tiles[:, 3] = np.maximum(tiles[:, 3], positions - positions % chunk)
    tiles[:, 4] = step.positions.take(last_tokens) + 1
    tiles[:, 5] = step.request_of_row.take(tokens)
    tiles[:, 6] = -1
    if spans is not None:
        tiles[:, 7] = _image_ends(step, spans, tokens)
        tiles[:, 4] = np.maximum(tiles[:, 4], tiles[:, 7])
    return tiles, begins


def _image_ends(step: StepRows, spans: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the position after the image that each token is in, [T]; 0 for text."""
    own = spans.take(np.maximum(spans[:, 0].searchsorted(tokens, "right") - 1, 0), 0)  # [T, 2]
    is_inside = (own[:, 0] <= tokens) & (tokens < own[:, 1])
    return (step.positions.take(own[:, 1] - 1) + 1) * is_inside


def _cut_requests(step: StepRows, chunk: int | None, spans: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token and the length of each part of a request's rows, [S] each.

    A part lies within one chunk of the context. All rows of a tile then see the same first key. A part has only text,
    or one image whose rows attend to each other.
    """
    is_first = np.zeros(step.num_tokens, bool) if chunk is None else step.positions % chunk == 0
    is_first[step.cu_seqlens_q[:-1]] = True
    if spans is not None:
        edges = spans.ravel()
        is_first[edges[edges < step.num_tokens]] = True
    starts = np.flatnonzero(is_first)
    return starts, np.diff(starts, append=step.num_tokens)


def _split_tiles(
    tiles: np.ndarray,  # [T, ITEM_FIELDS]
    stages: np.ndarray,  # [T]
    splits: np.ndarray,  # [T]; 1 for a tile that stays whole
    key_step: int,
) -> WorkItems:
    """Return the items of tiles, some of which are split, and the rows to merge."""
    splits = splits.astype(np.int32)
    ends = splits.cumsum(dtype=np.int32)  # [T] number of items up to the end of each tile
    # A tile has splits of `each` stages, followed by splits of one more stage.
    each = stages // splits
    shorter = splits - (stages - each * splits)
    table = tiles.repeat(splits, 0)
    # [num_items] index of the split in its tile
    index = np.arange(len(table), dtype=np.int32) - (ends - splits).repeat(splits)
    stage = index * each.repeat(splits) + np.maximum(index - shorter.repeat(splits), 0)
    starts = stage * key_step + table[:, 3]
    table[:, 3] = starts
    table[:-1, 4] = starts[1:]  # a split ends where the next split begins
    table[ends - 1, 4] = tiles[:, 4]

    whole = splits == 1
    rows = tiles[:, 1]
    partial_rows = rows * ~whole  # [T] partial rows of each split
    all_partial_rows = partial_rows * splits
    partial_ends = all_partial_rows.cumsum(dtype=np.int32)
    first_partial = partial_ends - all_partial_rows
    first_partial[whole] = -1
    table[:, 6] = index * partial_rows.repeat(splits) + first_partial.repeat(splits)

    merges = np.empty((len(tiles), 3), np.int32)  # for each tile's first row
    merges[:, 0] = first_partial
    merges[:, 1] = splits
    merges[:, 2] = partial_rows
    merges[whole] = 0
    merges = merges.repeat(rows, 0)  # [N * group, 3]
    row = np.arange(len(merges)) - tiles[:, 0].repeat(rows)  # index of the row in its tile
    merges[:, 0] += row * (merges[:, 1] > 0)
    return WorkItems(_longest_first(table), merges, int(partial_ends[-1]))


def _longest_first(table: np.ndarray) -> np.ndarray:
    """Return the items in descending order of their numbers of keys.

    The GPU starts threadgroups in order, and a long one that started last would run alone.
    """
    return table.take((table[:, 3] - table[:, 4]).argsort(kind="stable"), 0)
