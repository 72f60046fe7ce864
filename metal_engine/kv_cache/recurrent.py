"""Recurrent state of one layer: for each request a few arrays of fixed size, written anew with every step.

The pool has a row for each slot. Yet the states that a step computes do not go there at once: they are kept as they
came out, *pending*, one compact array for each group of segments. The next step takes them from there: as they are if
the same requests go on in the same order, which is what decoding does, else row by row. Only what it does not replace
is written to the pool, before the step reads from that. Never the other way round in one evaluation: a write to an
array that an earlier operation still reads makes MLX copy all of the pool.
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
    """States that the last step computed: ``values`` [b, ...] of requests that keep theirs in ``slots``, [b]."""

    slots: Slots
    values: mx.array

    def only(self, wanted: list[int]) -> PendingStates:
        """Those at some places of the group, in order."""
        if len(wanted) == len(self.slots):
            return self
        return PendingStates(tuple(self.slots[i] for i in wanted), self.values[mx.array(wanted)])


PendingByArray = dict[str, list[PendingStates]]
"""By name of an array of a layer, what is pending of it."""


@dataclass(frozen=True)
class Rows:
    """Some rows of one array of states.

    Attributes:
        source: index of a pending array; None for the pool.
        index: [k] which rows; None for all of a pending array.
    """

    source: int | None
    index: mx.array | None

    def of(self, pending: Sequence[mx.array], pool: mx.array) -> mx.array:
        array = pool if self.source is None else pending[self.source]
        return array if self.index is None else array[self.index]


@dataclass(frozen=True)
class StateTransferPlan:
    """What a step does with the states at hand, before its layers read them; the same for every layer.

    Attributes:
        written: rows of pending arrays that go to the pool.
        slots: [k] where they go.
        taken: what each group goes on from, one after the other; None for one that begins with nothing.
    """

    written: list[Rows]
    slots: mx.array | None
    taken: list[list[Rows] | None]

    @property
    def are_any(self) -> bool:
        """Whether anything is copied: it is not where groups go on from pending arrays as they are."""
        whole = (runs is None or (len(runs) == 1 and runs[0].index is None) for runs in self.taken)
        return self.slots is not None or not all(whole)


# Every array of every layer asks the same in a step, but for layers of another kind.
@lru_cache(maxsize=8)
def plan_moves(
    pending: tuple[Slots, ...], reads: tuple[Slots | None, ...], writes: tuple[Slots, ...]
) -> StateTransferPlan:
    """How a step gets its states.

    Any slot may be ``PADDING_SLOT``, for padded rows.

    Args:
        pending: slots of the pending arrays' rows.
        reads: slots for each group; None for one that begins with nothing.
        writes: slots that each group will leave its states in: what is in them now is of no use after the step.
    """
    rows = [(slot, (source, row)) for source, slots in enumerate(pending) for row, slot in enumerate(slots)]
    pending_states = dict(rows)
    # Padded rows follow each other, so that those of a step before are taken with the whole array that they are in.
    trash = iter([place for slot, place in rows if slot == PADDING_SLOT])
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
            next(trash, (None, ZERO_STATE_SLOT)) if slot == PADDING_SLOT else pending_states.get(slot, (None, slot))
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
    """The states of one layer, in slots of requests (:class:`metal_engine.kv_cache.state.LayerState`).

    Attributes:
        arrays: by name, [1 + num_slots, ...]; the row of ``ZERO_STATE_SLOT`` stays zeros.
        has_moved: whether states have been copied, to slots or into another order, since it was last set to False.
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
        # Objects of our own, as for the states of tokens.
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
        """Give away the states from which a step of decodes goes on, [b, ...], until :meth:`attach_arrays`."""
        (states,) = self.take(name, [reads], [writes])
        assert states is not None
        return states

    def pending_states(self) -> PendingByArray:
        """What is pending: to go back to if a step was built in vain.

        What :meth:`take` has written to the pool since then is pending there, too, and so is written again.
        """
        return {name: list(pending) for name, pending in self._pending.items()}

    def restore_pending_states(self, pending: PendingByArray) -> None:
        self._pending = pending

    def attach_arrays(self, name: str, slots: Slots, values: mx.array) -> None:
        """Have the states that are to be in some slots, [b, ...], of the shape that :meth:`detach_arrays` gives."""
        self._pending[name] = [PendingStates(slots, values)]

    def pending(self) -> list[mx.array]:
        """The states that the step built last has computed."""
        return [p.values for pending in self._pending.values() for p in pending]

    def take(self, name: str, reads: list[Slots | None], writes: list[Slots]) -> list[mx.array | None]:
        """The states from which a step's groups go on, each [b, ...]; called once in a step for each array.

        Args:
            name: of the array.
            reads: slots for each group; None for one that begins with nothing.
            writes: slots that each group will leave its states in, with :meth:`put`.
        """
        pending, self._pending[name] = self._pending.get(name, []), []
        moves = plan_moves(tuple(p.slots for p in pending), tuple(reads), tuple(writes))
        self.has_moved = self.has_moved or moves.are_any
        values = [p.values for p in pending]
        if moves.slots is not None:
            array = self.arrays.pop(name)  # one owner at a time, so that the write is in place
            array[moves.slots] = _joined([rows.of(values, array) for rows in moves.written])
            self.arrays[name] = array
        pool = self.arrays[name]
        return [None if runs is None else _joined([rows.of(values, pool) for rows in runs]) for runs in moves.taken]

    def forget(self, slots: set[int]) -> None:
        """Give up what is pending for some slots: what is to be there comes from elsewhere."""
        for name, pending in self._pending.items():
            kept = [(p, [i for i, slot in enumerate(p.slots) if slot not in slots]) for p in pending]
            self._pending[name] = [p.only(wanted) for p, wanted in kept if wanted]

    def read(self, name: str, slots: Sequence[int]) -> mx.array:
        """The states in some slots, as the steps built so far leave them, [len(slots), ...]."""
        pending = _by_slot(self._pending.get(name, []))
        pool = self.arrays[name]
        return mx.concatenate([pending[slot] if slot in pending else pool[slot : slot + 1] for slot in slots])

    def put(self, name: str, slots: Slots, values: mx.array) -> None:
        """Keep the states that a group leaves, [b, ...], for the next step."""
        spec = self.spec.request_arrays[name]
        if values.shape[1:] != spec.shape:  # one that grows up to its size: zeros stand for what is missing
            missing = [(want - have, 0) for want, have in zip(spec.shape, values.shape[1:], strict=True)]
            values = mx.pad(values, [(0, 0), *missing])
        # A slice would keep all of what it was cut from: the states after each token of a chunk, say.
        self._pending[name].append(PendingStates(slots, mx.contiguous(values.astype(spec.dtype))))


def _by_slot(pending: list[PendingStates]) -> dict[int, mx.array]:
    """By slot, the states [1, ...] that have not been written to the pool."""
    return {slot: p.values[i : i + 1] for p in pending for i, slot in enumerate(p.slots)}


def reads_of(groups: list[SegmentGroup]) -> list[Slots | None]:
    """What each group goes on from, for :meth:`RecurrentState.take`."""
    return [None if group.is_fresh else group.reads for group in groups]
