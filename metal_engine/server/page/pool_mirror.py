"""State of the block pool according to the frames so far: block tables and cached blocks, as runs of block ids.

A new viewer gets this state first, and then the same frames as the other viewers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from metal_engine.engine.step_observer import Frame, SeenRequest

BlockRun = tuple[int, int]
"""First block id of a run of consecutive ids, and the length of the run."""
# Number of runs after which a piece of a snapshot ends. Encoding that many takes 2 ms.
_RUNS_AT_ONCE = 4096


def runs_of(block_ids: Iterable[int]) -> list[BlockRun]:
    """Convert block ids to runs, in their order."""
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
    """Copy of the pool's state, updated from frames (:class:`metal_engine.engine.step_observer.Frame`).

    Args:
        num_blocks: number of blocks in the pool.

    Attributes:
        requests: running and preempted requests by :attr:`SeenRequest.key`.
        tables: block table of each request as runs of block ids, by the request's key.
        is_whole: True if the frames so far describe the complete pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.requests: dict[int, SeenRequest] = {}
        self.tables: dict[int, list[BlockRun]] = {}
        self.is_whole = False
        self._cached = bytearray(num_blocks)

    def apply(self, frame: Frame) -> None:
        """Update the state with a frame."""
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
        """Runs of blocks that hold cached prefixes."""
        return [(match.start(), match.end() - match.start()) for match in re.finditer(b"\x01+", self._cached)]

    def pieces(self) -> Iterator[tuple[dict[int, list[BlockRun]], list[BlockRun]]]:
        """Return an iterator over the current state in pieces. Later frames do not change the pieces.

        Each piece has some block tables by request key, and some runs of cached blocks.
        """
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
