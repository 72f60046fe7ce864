"""Recurrent state of one layer: for each request a few arrays of fixed size, rewritten in every step.

The pool has a row for each slot. A step does not write its new states to the pool at once. They stay *pending*: one
compact array for each group of segments (:class:`metal_engine.kv_cache.segments.SegmentGroup`). If the next step has
the same requests in the same order, as in decoding, it uses the pending arrays directly. Otherwise it gathers the
states row by row.

Before a step reads from the pool, the pending states that the step does not replace are written to it. Within one
evaluation, no write follows a read of the same pool array: MLX would then copy the whole array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import mlx.core as mx

from metal_engine.kv_cache.segments import PADDING_SLOT, ZERO_STATE_SLOT, SegmentGroup, Slots
from metal_engine.kv_cache.spec import RecurrentSpec
from metal_engine.kv_cache.state import StateSnapshot


@dataclass(frozen=True)
class PendingStates:
    """States that the last step computed for one group: ``values``, [b, ...], which belong in ``slots``, [b]."""

    slots: Slots
    values: mx.array

    def only(self, wanted: list[int]) -> PendingStates:
        """Return the states at some indices of ``slots``, given in ascending order without repetition."""
        if len(wanted) == len(self.slots):
            return self
        return PendingStates(tuple(self.slots[i] for i in wanted), self.values[mx.array(wanted)])


PendingByArray = dict[str, list[PendingStates]]
"""Maps the name of an array of a layer to its pending states."""


@dataclass(frozen=True)
class Rows:
    """Selection of rows of one array of states.

    Attributes:
        source: index of a pending array; None for the pool.
        index: [k] row indices; None for all rows of a pending array.
    """

    source: int | None
    index: mx.array | None

    def of(self, pending: Sequence[mx.array], pool: mx.array) -> mx.array:
        array = pool if self.source is None else pending[self.source]
        return array if self.index is None else array[self.index]


@dataclass(frozen=True)
class StateTransferPlan:
    """Copies of states that a step makes before its layers read the states. All layers make the same copies.

    Attributes:
        written: rows of pending arrays that are written to the pool.
        slots: [k] int32, destination slots of these rows; None if no rows are written.
        taken: for each group, the selections that together hold its initial states, in order; None if the group starts
            from a zero state.
    """

    written: list[Rows]
    slots: mx.array | None
    taken: list[list[Rows] | None]

    @property
    def has_copies(self) -> bool:
        """True if the step copies states.

        False if no pending state is written to the pool, and the initial states of each group of segments are either
        zero or exactly one array of pending states.
        """
        whole = (runs is None or (len(runs) == 1 and runs[0].index is None) for runs in self.taken)
        return self.slots is not None or not all(whole)


# Cached: in a step, the arguments are the same for all arrays whose layers process the segments in the same groups.
@lru_cache(maxsize=8)
def plan_transfers(
    pending: tuple[Slots, ...], reads: tuple[Slots | None, ...], writes: tuple[Slots, ...]
) -> StateTransferPlan:
    """Plan the copies of one array's states for a step.

    Any slot may be ``PADDING_SLOT``, for padding rows.

    Args:
        pending: slots of the rows of each pending array.
        reads: slots of the initial states of each group; None if the group starts from a zero state.
        writes: slots for the new states of each group. The step replaces the current states in these slots.
    """
    rows = [(slot, (source, row)) for source, slots in enumerate(pending) for row, slot in enumerate(slots)]
    pending_states = dict(rows)
    # Padding rows take the padding rows of the previous step in order, so that a pending array can be used as a whole.
    padding = iter([place for slot, place in rows if slot == PADDING_SLOT])
    overwritten = {PADDING_SLOT, *(slot for slots in writes for slot in slots)}
    left = [[row for row, slot in enumerate(slots) if slot not in overwritten] for slots in pending]
    written = [_rows(source, rows, pending) for source, rows in enumerate(left) if rows]
    slots = [pending[source][row] for source, rows in enumerate(left) for row in rows]
    taken: list[list[Rows] | None] = []
    for group in reads:
        if group is None:
            taken.append(None)
            continue
        places = [
            next(padding, (None, ZERO_STATE_SLOT)) if slot == PADDING_SLOT else pending_states.get(slot, (None, slot))
            for slot in group
        ]
        runs = [(source, [row for _, row in run]) for source, run in groupby(places, key=itemgetter(0))]
        taken.append([_rows(source, rows, pending) for source, rows in runs])
    return StateTransferPlan(written, mx.array(slots) if slots else None, taken)


def _rows(source: int | None, rows: list[int], pending: tuple[Slots, ...]) -> Rows:
    is_all = source is not None and rows == list(range(len(pending[source])))
    return Rows(source, None if is_all else mx.array(rows))


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class RecurrentState:
    """States of one layer, in slots of requests (:class:`metal_engine.kv_cache.state.LayerState`).

    Attributes:
        arrays: arrays by name, [1 + num_slots, ...]. The row of ``ZERO_STATE_SLOT`` stays zero.
        has_moved: True if states have been copied, to slots or into another order, since the last reset to False.
    """

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec = spec
        self.arrays: dict[str, mx.array] = {}
        self._pending: dict[str, list[PendingStates]] = {}
        self.has_moved = False

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int) -> None:
        self.arrays = {
            name: mx.zeros((1 + num_state_slots, *array.shape), array.dtype)
            for name, array in self.spec.request_arrays.items()
        }
        self._pending = {}

    def release(self) -> None:
        self.arrays = {}
        self._pending = {}

    def snapshot(self) -> StateSnapshot:
        # New array objects, because writes modify objects in place, as for the states of tokens.
        arrays = {name: array.reshape(array.shape) for name, array in self.arrays.items()}
        return StateSnapshot(arrays, self.pending_states())

    def restore(self, snapshot: StateSnapshot) -> None:
        self.arrays = dict(snapshot.arrays)
        self._pending = dict(snapshot.pending)

    def block_arrays(self) -> dict[str, mx.array]:
        return {}

    def writes_done_marker(self) -> list[mx.array]:
        return [*self.arrays.values(), *self.pending()]

    def detach_arrays(self, name: str, reads: Slots, writes: Slots) -> mx.array:
        """Return the initial states of a decode step, [b, ...]. :meth:`attach_arrays` stores the states after the step.

        Has the arguments and side effects of :meth:`take`, for a single group.
        """
        (states,) = self.take(name, [reads], [writes])
        assert states is not None
        return states

    def pending_states(self) -> PendingByArray:
        """Return the pending states, to restore if a step is discarded.

        The result also has the pending states that :meth:`take` writes to the pool later. After a restore they are
        written again.
        """
        return {name: list(pending) for name, pending in self._pending.items()}

    def restore_pending_states(self, pending: PendingByArray) -> None:
        self._pending = pending

    def attach_arrays(self, name: str, slots: Slots, values: mx.array) -> None:
        """Store states of an array, [b, ...], as pending states of ``slots``. Drops its earlier pending states."""
        self._pending[name] = [PendingStates(slots, values)]

    def pending(self) -> list[mx.array]:
        """Return the new states of the step built last, [b, ...] for each array and group."""
        return [p.values for pending in self._pending.values() for p in pending]

    def take(self, name: str, reads: list[Slots | None], writes: list[Slots]) -> list[mx.array | None]:
        """Return the initial states of the step's groups, each [b, ...]. Call it once per step and array.

        Pending states that the step does not replace are written to the pool. The array has no pending states
        afterwards.

        Args:
            name: name of the array.
            reads: slots of the initial states of each group; None if the group starts from a zero state.
            writes: slots in which :meth:`put` will store the new states of each group.

        Returns:
            For each group, the states; None if the group starts from a zero state.
        """
        pending, self._pending[name] = self._pending.get(name, []), []
        plan = plan_transfers(tuple(p.slots for p in pending), tuple(reads), tuple(writes))
        self.has_moved = self.has_moved or plan.has_copies
        values = [p.values for p in pending]
        if plan.slots is not None:
            array = self.arrays.pop(name)  # a single owner, so that the write is in place
            array[plan.slots] = _joined([rows.of(values, array) for rows in plan.written])
            self.arrays[name] = array
        pool = self.arrays[name]
        return [None if runs is None else _joined([rows.of(values, pool) for rows in runs]) for runs in plan.taken]

    def forget(self, slots: set[int]) -> None:
        """Discard the pending states of ``slots``.

        Call it if a store provides the states of these slots, or if no request needs them.
        """
        for name, pending in self._pending.items():
            kept = [(p, [i for i, slot in enumerate(p.slots) if slot not in slots]) for p in pending]
            self._pending[name] = [p.only(wanted) for p, wanted in kept if wanted]

    def read(self, name: str, slots: Sequence[int]) -> mx.array:
        """Return the states in some slots after the steps built so far, [len(slots), ...]."""
        pending = _by_slot(self._pending.get(name, []))
        pool = self.arrays[name]
        return mx.concatenate([pending[slot] if slot in pending else pool[slot : slot + 1] for slot in slots])

    def put(self, name: str, slots: Slots, values: mx.array) -> None:
        """Store a group's new states, [b, ...], as pending states, after :meth:`take` for the same step.

        Smaller states are padded with zeros at the end of each axis.
        """
        spec = self.spec.request_arrays[name]
        if values.shape[1:] != spec.shape:  # a state that grows to its full size: pad with zeros
            missing = [(want - have, 0) for want, have in zip(spec.shape, values.shape[1:], strict=True)]
            values = mx.pad(values, [(0, 0), *missing])
        # Without a copy, a slice would keep its whole base array in memory, such as states after each token of a chunk.
        self._pending[name].append(PendingStates(slots, mx.contiguous(values.astype(spec.dtype))))


def _by_slot(pending: list[PendingStates]) -> dict[int, mx.array]:
    """Return the pending states by slot, each [1, ...]."""
    return {slot: p.values[i : i + 1] for p in pending for i, slot in enumerate(p.slots)}


def reads_of(groups: list[SegmentGroup]) -> list[Slots | None]:
    """Return the slots of each group's initial states, for :meth:`RecurrentState.take`."""
    return [None if group.is_fresh else group.reads for group in groups]
