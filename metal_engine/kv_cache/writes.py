"""Three ways to write a step's packed rows into arrays that have a row for each slot of the pool.

All leave the same contents. Which one is used is decided once, for an engine, by :func:`choose_writes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
import numpy as np

from metal_engine.device.info import computes_on_cpu

# Rows from which a run is written as a slice: one slice costs as much as writing about ten rows by slot (CPU).
MIN_RUN = 16


class Writes(Protocol):
    """Where the rows of one step go; used for every array of every layer."""

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        """``array`` [num_slots, ...] with ``rows`` [N, ...] written to their slots.

        The write is in place if the caller keeps no other reference to ``array`` until the step is evaluated.
        """
        ...


class HasWrites(Protocol):
    """What the states of tokens need of a step: a ``StepRows``, or what a trace knows of one."""

    @property
    def writes(self) -> Writes: ...


MakeWrites = Callable[[np.ndarray, int], Writes]
"""From the slots of a step's rows, [N] int32, and the block size to the way in which they are written."""


class SlotWrites:
    """Writes row by row, as one scatter; of several rows those that are given, else all."""

    def __init__(self, slots: np.ndarray, block_size: int, rows: np.ndarray | None = None) -> None:
        self._slots = mx.array(slots if rows is None else slots[rows])  # [M]
        self._rows = None if rows is None else mx.array(rows)  # [M]

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        if self._slots.size:
            array[self._slots] = rows if self._rows is None else rows[self._rows]
        return array


class TracedWrites:
    """Writes all rows as one scatter, to slots that a trace knows as an array, [N] int32."""

    def __init__(self, slots: mx.array) -> None:
        self._slots = slots

    def write(self, array: mx.array, rows: mx.array) -> mx.array:
        array[self._slots] = rows
        return array


class BlockWrites:
    """Writes the rows that fill whole blocks block by block: for a GPU under page-aligned scheduling."""

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
    """Writes rows with consecutive slots as slices: fastest on a CPU, whole blocks or not."""

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
    """Returns the rows left to write one by one, [M] int32; None if that is every row."""
    if len(written) == 0:
        return None
    is_other = np.ones(len(slots), bool)
    is_other[written] = False
    return np.flatnonzero(is_other).astype(np.int32)


def choose_writes(*, page_aligned: bool) -> MakeWrites:
    """The fastest way on this device; a GPU wants one launch for all rows, and by block only where many fill some."""
    if computes_on_cpu():
        return RunWrites
    return BlockWrites if page_aligned else SlotWrites


def consecutive_runs(numbers: np.ndarray, min_length: int = 1) -> np.ndarray:
    """Where numbers (slots, blocks) follow each other: [num_runs, 3] of first index, length, first number."""
    starts = np.flatnonzero(np.concatenate([[True], np.diff(numbers) != 1]))
    runs = np.stack([starts, np.diff(starts, append=len(numbers)), numbers[starts]], axis=1)
    return runs[runs[:, 1] >= min_length]


def whole_block_rows(slots: np.ndarray, block_size: int) -> np.ndarray:
    """The packed rows that fill whole blocks, [W, block_size] int32: one row of the result for each block."""
    runs = consecutive_runs(slots)
    left_in_run = np.repeat(runs[:, 0] + runs[:, 1], runs[:, 1]) - np.arange(len(slots))
    starts = np.flatnonzero((slots % block_size == 0) & (left_in_run >= block_size))
    return (starts[:, None] + np.arange(block_size)).astype(np.int32)
