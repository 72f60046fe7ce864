"""Cuts a step into the kernel's work items: pure NumPy, done once per step.

A mixed batch, 2 query heads per KV head, tiles of 8 rows (4 tokens); the last column is the item's keys. A tile is full
wherever its request has rows, even if it ends between the heads of a token::

    request 0  fresh, 6 tokens     [t0 t1 t2 t3]                  keys 0 .. 3
                                   [t4 t5]                        keys 0 .. 5
    request 1  chunk of 3, at 9    [t6 t7 t8]                     keys 0 .. 11
    request 2  decode, at 5,000    [t9]                           keys 0 .. 447        split, merged afterwards
                                   [t9]                           keys 448 .. 959
                                   ...
                                   [t9]                           keys 4,544 .. 5,000

Every item is run once per KV head. A decode is an item with one token, alone or in company.

The kernel takes keys in *stages* of ``key_step``. A tile's splits share its stages out evenly::

    1,030 keys, stages of 64       |00|000|000|000|000|00.|       6 splits of 2 or 3 stages; the last stage has 6 keys

How many splits a tile has depends on its own request and on the device, not on the rest of the step: a request is split
as if it were alone. So it gets the same bits in any company.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metal_engine.kv_cache.rows import StepRows

# Fields of an item in the kernel's table (paged_attention.metal): first row, rows, position of the first, first key,
# end of the keys, request, first partial row or -1. ITEM_FIELDS reaches the kernel as a template argument.
# A row is (packed token) * group + (query head of the group): a tile may begin and end within a token.
ITEM_FIELDS = 7

# Merging is one more launch in every layer: not for less.
MIN_KEYS_TO_SPLIT = 512
# A split writes its rows' outputs in float32 and the merge reads them: for each row as many bytes as K and V of 2 keys
# have in half precision. With KEYS_PER_ROW keys for each row that is a sixteenth of the K and V that the split reads;
# with 16 rows and SHORT_ENOUGH_KEYS an eighth, with more rows more.
# The shortest split has so many, but at least MIN_SPLIT_KEYS, for fewer are not worth a threadgroup, and at most
# SHORT_ENOUGH_KEYS, for one with many rows takes its time by computing.
KEYS_PER_ROW = 32
MIN_SPLIT_KEYS = 128
SHORT_ENOUGH_KEYS = 256
# Nor for less than a quarter of the time that a request's longest item takes.
WORTH_MERGING = 0.75
# Of a tile: a thread of the merge reads them one after the other. It reaches that kernel as a template argument.
MAX_SPLITS = 128


@dataclass(frozen=True)
class WorkItems:
    """The work of a step for layers of one kind."""

    table: np.ndarray  # [num_items, ITEM_FIELDS] int32
    rows: np.ndarray  # [N * group, 3] int32: first partial row, splits, partial rows between splits; for the merge
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
    target_threadgroups: int,
    key_step: int,
    tile_rows: int,
) -> WorkItems:
    """Work items of a step.

    Args:
        target_threadgroups: a request is split until it has about so many, as far as its splits stay long enough.
        key_step: splits begin at multiples of it after the range's first key.
        tile_rows: most rows of an item.
    """
    tiles, begins = _cut_tiles(step, group, tile_rows, window)
    keys = tiles[:, 4] - tiles[:, 3]  # [T], as all that follow but `work`
    splittable = keys >= MIN_KEYS_TO_SPLIT
    if not splittable.any():
        return WorkItems(_longest_first(tiles), np.zeros((step.num_tokens * group, 3), np.int32), 0)

    stages = (keys + (key_step - 1)) // key_step
    # A request's tiles share the device as if it were alone: each tile may have its part of the target.
    work = np.add.reduceat(stages, begins, dtype=np.int64) * num_kv_heads  # [B]
    fair = stages * np.int64(target_threadgroups) // work.take(tiles[:, 5])
    # At least two stages, so that a last split whose last stage is not full is no shorter than half of the others.
    shortest = np.minimum(tiles[:, 1] * KEYS_PER_ROW, SHORT_ENOUGH_KEYS)
    shortest = np.maximum(shortest, max(MIN_SPLIT_KEYS, 2 * key_step))
    worth = stages // ((shortest + (key_step - 1)) // key_step)
    most = np.maximum(1, np.minimum(np.minimum(fair, worth), MAX_SPLITS) * splittable)
    # A tile is done when its longest split is. Fewer splits that are no longer do as well.
    longest = -(-stages // most)
    if len(begins) < len(tiles):
        # A request is done when its longest item is, and a tile that stays whole may be nearly as long.
        before, after = (np.maximum.reduceat(lengths, begins).take(tiles[:, 5]) for lengths in (stages, longest))
        longest = np.where(after <= before * WORTH_MERGING, longest, stages)
    return _split_tiles(tiles, stages, -(-stages // longest), key_step)


def _cut_tiles(step: StepRows, group: int, tile_rows: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """A whole item for each tile in the order of the rows, [T, ITEM_FIELDS] int32; the first of each request, [B]."""
    if step.num_tokens == step.num_requests and group <= tile_rows:  # decodes only, a tile each
        tokens = begins = np.arange(step.num_tokens)
        first_rows = tokens * group
        last_tokens = tokens
    else:
        counts = -(-step.query_lens * group // tile_rows)
        begins = counts.cumsum() - counts
        first_rows = (step.cu_seqlens_q[:-1] * group - begins * tile_rows).repeat(counts)
        first_rows += np.arange(len(first_rows)) * tile_rows
        tokens = first_rows // group
        last_tokens = (np.append(first_rows[1:], step.num_tokens * group) - 1) // group
    positions = step.positions.take(tokens)
    tiles = np.empty((len(tokens), ITEM_FIELDS), np.int32)
    tiles[:, 0] = first_rows
    tiles[:-1, 1] = first_rows[1:]  # a tile ends where the next one begins
    tiles[-1, 1] = step.num_tokens * group
    tiles[:, 1] -= tiles[:, 0]
    tiles[:, 2] = positions
    tiles[:, 3] = 0 if window is None else np.maximum(0, positions - (window - 1))
    tiles[:, 4] = step.positions.take(last_tokens) + 1
    tiles[:, 5] = step.request_of_row.take(tokens)
    tiles[:, 6] = -1
    return tiles, begins


def _split_tiles(
    tiles: np.ndarray,  # [T, ITEM_FIELDS]
    stages: np.ndarray,  # [T]
    splits: np.ndarray,  # [T]; 1: the tile stays whole
    key_step: int,
) -> WorkItems:
    """The items of tiles of which some are split, and how rows are merged."""
    splits = splits.astype(np.int32)
    ends = splits.cumsum(dtype=np.int32)  # [T] items up to the last of each tile
    # Splits of `each` stages, and at the end of the tile some of one more.
    each = stages // splits
    shorter = splits - (stages - each * splits)
    table = tiles.repeat(splits, 0)
    index = np.arange(len(table), dtype=np.int32) - (ends - splits).repeat(splits)  # [num_items] of a split in its tile
    stage = index * each.repeat(splits) + np.maximum(index - shorter.repeat(splits), 0)
    starts = stage * key_step + table[:, 3]
    table[:, 3] = starts
    table[:-1, 4] = starts[1:]  # a split ends where the next one begins
    table[ends - 1, 4] = tiles[:, 4]

    whole = splits == 1
    rows = tiles[:, 1]
    partial_rows = rows * ~whole  # [T] that a split writes
    all_partial_rows = partial_rows * splits
    partial_ends = all_partial_rows.cumsum(dtype=np.int32)
    first_partial = partial_ends - all_partial_rows
    first_partial[whole] = -1
    table[:, 6] = index * partial_rows.repeat(splits) + first_partial.repeat(splits)

    merges = np.empty((len(tiles), 3), np.int32)  # of each tile's first row
    merges[:, 0] = first_partial
    merges[:, 1] = splits
    merges[:, 2] = partial_rows
    merges[whole] = 0
    merges = merges.repeat(rows, 0)  # [N * group, 3]
    row = np.arange(len(merges)) - tiles[:, 0].repeat(rows)  # in its tile
    merges[:, 0] += row * (merges[:, 1] > 0)
    return WorkItems(_longest_first(table), merges, int(partial_ends[-1]))


def _longest_first(table: np.ndarray) -> np.ndarray:
    """The GPU starts threadgroups in order: a long one at the end would run alone."""
    return table.take((table[:, 3] - table[:, 4]).argsort(kind="stable"), 0)
