"""Ways to write a step's packed rows into arrays that have a row for each slot of the pool.

All ways give the same contents. :func:`choose_writes` selects one of them once per engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import numpy as np

from metal_engine.device.info import computes_on_cpu

# Minimum length of a run of consecutive slots that is written as a slice. On a CPU, one slice costs as much as ten rows
# written by slot.
MIN_RUN = 16


class Writes(Protocol):
    """Writer of the rows of one step to their slots, used for every array of every layer."""

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        """Return ``array`` [num_slots, ...] with ``rows`` [N, ...] written to their slots. May change ``array``.

        The device writes in place if nothing else refers to ``array`` when the step is evaluated.
        """
        ...


class HasWrites(Protocol):
    """Object with the writes of a step: ``StepRows``, or ``TracedRows`` in a trace."""

    @property
    def writes(self) -> Writes: ...


MakeWrites = Callable[[np.ndarray, int], Writes]
"""Creates the ``Writes`` of a step from the slots of its rows, [N] int32, and the block size."""


class SlotWrites:
    """Writes rows as one scatter: the rows with the indices ``rows``, or all rows if ``rows`` is None."""

    def __init__(self, slots: np.ndarray, block_size: int, rows: np.ndarray | None = None) -> None:
        self._slots = mx.array(slots if rows is None else slots[rows])  # [M]
        self._rows = None if rows is None else mx.array(rows)  # [M]

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        if self._slots.size:
            array[self._slots] = rows if self._rows is None else rows[self._rows]
        return array


class TracedWrites:
    """Writes all rows as one scatter, to slots in an array, [N] int32, that is an input of a trace."""

    def __init__(self, slots: mx.array) -> None:
        self._slots = slots

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        array[self._slots] = rows
        return array


class BlockWrites:
    """Writes rows that fill whole blocks by block, and all other rows by slot. For page-aligned scheduling on a GPU."""

    def __init__(self, slots: np.ndarray, block_size: int) -> None:
        self._block_size = block_size
        whole = whole_block_rows(slots, block_size)  # [W, block_size]
        self._rows = mx.array(whole.ravel())
        self._block_ids = mx.array(slots[whole[:, 0]] // block_size)
        self._others = SlotWrites(slots, block_size, _others(slots, whole.ravel()))

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        if self._block_ids.size:
            blocks = array.reshape(-1, self._block_size, *array.shape[1:])
            blocks[self._block_ids] = rows[self._rows].reshape(-1, self._block_size, *rows.shape[1:])
            array = blocks.reshape(-1, *rows.shape[1:])
        return self._others.write(array, rows)


class RunWrites:
    """Writes runs of at least ``MIN_RUN`` consecutive slots as slices, and all other rows by slot. Fastest on a CPU."""

    def __init__(self, slots: np.ndarray, block_size: int) -> None:
        runs = consecutive_runs(slots, MIN_RUN)  # [num_runs, 3]
        self._runs: list[tuple[int, int, int]] = list(map(tuple, runs.tolist()))
        in_runs = [np.arange(first, first + count) for first, count, _ in self._runs]
        self._others = SlotWrites(slots, block_size, _others(slots, np.concatenate([np.zeros(0, int), *in_runs])))

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        for first, count, slot in self._runs:
            array[slot : slot + count] = rows[first : first + count]
        return self._others.write(array, rows)


def _others(slots: np.ndarray, written: np.ndarray) -> np.ndarray | None:
    """Return the indices of the rows that are not in ``written``, [M] int32.

    Return None if ``written`` is empty. None stands for all rows.
    """
    if len(written) == 0:
        return None
    is_other = np.ones(len(slots), bool)
    is_other[written] = False
    return np.flatnonzero(is_other).astype(np.int32)


def choose_writes(*, page_aligned: bool) -> MakeWrites:
    """Return the fastest way to write rows on this device.

    A GPU writes all rows in one launch. It writes by block only under page-aligned scheduling, when many rows fill
    whole blocks.
    """
    if computes_on_cpu():
        return RunWrites
    return BlockWrites if page_aligned else SlotWrites


def consecutive_runs(numbers: np.ndarray, min_length: int = 1) -> np.ndarray:
    """Return runs of consecutive numbers (slots or blocks), [num_runs, 3]: first index, length, first number.

    ``numbers`` must not be empty. E.g. [[0, 2, 7], [2, 1, 3]] for [7, 8, 3].

    Args:
        min_length: length of the shortest runs to return.
    """
    starts = np.flatnonzero(np.concatenate([[True], np.diff(numbers) != 1]))
    runs = np.stack([starts, np.diff(starts, append=len(numbers)), numbers[starts]], axis=1)
    return runs[runs[:, 1] >= min_length]


def whole_block_rows(slots: np.ndarray, block_size: int) -> np.ndarray:
    """Return the indices of the packed rows that fill whole blocks, [number of such blocks, block_size] int32."""
    runs = consecutive_runs(slots)
    left_in_run = np.repeat(runs[:, 0] + runs[:, 1], runs[:, 1]) - np.arange(len(slots))
    starts = np.flatnonzero((slots % block_size == 0) & (left_in_run >= block_size))
    return (starts[:, None] + np.arange(block_size)).astype(np.int32)
