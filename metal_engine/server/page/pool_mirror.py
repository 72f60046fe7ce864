"""What frames have told of the pool so far: the block tables and the cached blocks, as runs of consecutive ids.

Whoever begins to look late is told this, and then the same frames as the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from metal_engine.engine.step_observer import Frame, SeenRequest

BlockRun = tuple[int, int]
"""A first block, and how many follow on one another."""
# Runs in one piece of a snapshot: 2 ms to encode.
_RUNS_AT_ONCE = 4096


def runs_of(block_ids: Iterable[int]) -> list[BlockRun]:
    """Block ids, in their order, as runs."""
    runs: list[BlockRun] = []
    first = after = -1
    for block_id in block_ids:
        if block_id != after:
            if after > first:
                runs.append((first, after - first))
            first = block_id
        after = block_id + 1
    if after > first:
        runs.append((first, after - first))
    return runs


class PoolMirror:
    """The pool as frames have told of it.

    Args:
        num_blocks: blocks in the pool.

    Attributes:
        requests: those that run or are preempted, by key.
        tables: block tables by key.
        is_whole: whether all of the pool has been told.
    """

    def __init__(self, num_blocks: int) -> None:
        self.requests: dict[int, SeenRequest] = {}
        self.tables: dict[int, list[BlockRun]] = {}
        self.is_whole = False
        self._cached = bytearray(num_blocks)

    def apply(self, frame: Frame) -> None:
        """Take in a frame."""
        if frame.forget:
            self.tables.clear()
            self._cached = bytearray(len(self._cached))
        self.requests.update((seen.key, seen) for seen in frame.requests)
        for key, change in frame.tables.items():
            if change.cleared:
                self.tables.pop(key, None)
            if change.added:
                self.tables[key] = self.tables.get(key, []) + runs_of(change.added)
        for key in frame.finished:
            self.requests.pop(key, None)
        for block_id in frame.cached:
            self._cached[block_id] = 1
        for block_id in frame.uncached:
            self._cached[block_id] = 0
        self.is_whole = frame.is_whole

    @property
    def cached_runs(self) -> list[BlockRun]:
        """The blocks that hold cached prefixes."""
        return [(match.start(), match.end() - match.start()) for match in re.finditer(b"\x01+", self._cached)]

    def pieces(self) -> Iterator[tuple[dict[int, list[BlockRun]], list[BlockRun]]]:
        """All tables and cached runs as they are now, some at a time; what is applied meanwhile is not among them."""
        tables, cached = list(self.tables.items()), self.cached_runs
        return self._pieces(tables, cached)

    @staticmethod
    def _pieces(
        tables: list[tuple[int, list[BlockRun]]], cached: list[BlockRun]
    ) -> Iterator[tuple[dict[int, list[BlockRun]], list[BlockRun]]]:
        piece: dict[int, list[BlockRun]] = {}
        num_runs = 0
        for key, runs in tables:
            piece[key] = runs
            num_runs += len(runs)
            if num_runs >= _RUNS_AT_ONCE:
                yield piece, []
                piece, num_runs = {}, 0
        yield piece, cached[:_RUNS_AT_ONCE]
        for start in range(_RUNS_AT_ONCE, len(cached), _RUNS_AT_ONCE):
            yield {}, cached[start : start + _RUNS_AT_ONCE]
