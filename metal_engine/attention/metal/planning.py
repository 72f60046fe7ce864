"""Cuts a step into the kernel's work items: pure NumPy, done once per step.

A mixed batch, 2 query heads per KV head, tiles of 8 rows (4 tokens); the last column is the item's keys. A tile is full
wherever its request has rows, even if it ends between the heads of a token::

    request 0  fresh, 6 tokens     [t0 t1 t2 t3]                  keys 0 .. 3
                                   [t4 t5]                        keys 0 .. 5
    request 1  chunk of 3, at 9    [t6 t7 t8]                     keys 0 .. 11
    request 2  decode, at 5,000    [t9]                           keys 0 .. 2,499      split, merged afterwards
                                   [t9]                           keys 2,500 .. 5,000

Every item is run once per KV head. A decode is an item with one token, alone or in company.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metal_engine.kv_cache.rows import StepRows

# Fields of an item in the kernel's table (paged_attention.metal): first row, rows, position of the first, first key,
# end of the keys, request, first partial row or -1. ITEM_FIELDS reaches the kernel as a template argument.
# A row is (packed token) * group + (query head of the group): a tile may begin and end within a token.
ITEM_FIELDS = 7
MIN_SPLIT_KEYS = 512  # a split shorter than this costs more to merge than it saves


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
    """Work items of a step, tiles of ``tile_rows`` rows.

    ``key_step``: splits begin at multiples of it after the range's first key.
    """
    tiles = []  # (first row, rows, first position, first key, end key, request)
    for request, (start, length, context) in enumerate(
        zip(step.cu_seqlens_q[:-1].tolist(), step.query_lens.tolist(), step.context_lens.tolist(), strict=True)
    ):
        for first in range(0, length * group, tile_rows):
            rows = min(tile_rows, length * group - first)
            position = context + first // group
            begin = 0 if window is None else max(0, position - window + 1)
            end = context + (first + rows - 1) // group + 1
            tiles.append((start * group + first, rows, position, begin, end, request))

    # Split what takes longer than a threadgroup's fair share of the step: a long context is split in company, too,
    # or it would run on long after all else is done.
    keys = sum(t[4] - t[3] for t in tiles)
    chunk = max(MIN_SPLIT_KEYS, -(-keys * num_kv_heads // target_threadgroups))
    chunk = -(-chunk // key_step) * key_step

    table: list[tuple[int, ...]] = []
    merged = np.zeros((step.num_tokens * group, 3), np.int32)
    partial = 0
    for first, rows, position, begin, end, request in tiles:
        if end - begin < 2 * chunk:
            table.append((first, rows, position, begin, end, request, -1))
            continue
        starts = range(begin, end, chunk)
        merged[first : first + rows, 0] = np.arange(partial, partial + rows)
        merged[first : first + rows, 1:] = len(starts), rows
        for start in starts:
            table.append((first, rows, position, start, min(start + chunk, end), request, partial))
            partial += rows
    # Long items first: the GPU starts threadgroups in order, and a long one at the end would run alone.
    order = np.argsort([t[3] - t[4] for t in table], kind="stable")
    return WorkItems(np.array(table, np.int32)[order], merged, partial)
