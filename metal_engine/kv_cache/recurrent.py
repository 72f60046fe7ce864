"""Recurrent state of one layer: for each request a few arrays of fixed size, written anew with every step.

The pool has a row for each slot. Yet the states that a step computes do not go there at once: they are kept as they
came out, *pending*, one compact array for each group of segments. The next step takes them from there if the same
requests go on in the same order, which is what decoding does. Only what is left over is written to the pool, before the
next step reads from it. Never the other way round in one evaluation: a write to an array that an earlier operation
still reads makes MLX copy all of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from metal_engine.kv_cache.segments import SegmentGroup, Slots
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


class RecurrentState:
    """The states of one layer, in slots of requests (:class:`metal_engine.kv_cache.state.LayerState`).

    Attributes:
        arrays: by name, [1 + num_slots, ...]; the row of ``NO_STATE`` stays zeros.
    """

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec = spec
        self.arrays: dict[str, mx.array] = {}
        self._pending: dict[str, list[PendingStates]] = {}

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
        return StateSnapshot(arrays, {name: list(pending) for name, pending in self._pending.items()})

    def restore(self, snapshot: StateSnapshot) -> None:
        self.arrays = dict(snapshot.arrays)
        self._pending = dict(snapshot.pending)

    def block_arrays(self) -> dict[str, mx.array]:
        return {}

    def written(self) -> list[mx.array]:
        return [*self.arrays.values(), *(p.values for pending in self._pending.values() for p in pending)]

    def take(self, name: str, reads: list[Slots | None], writes: list[Slots]) -> list[mx.array | None]:
        """The states from which a step's groups go on, each [b, ...]; called once in a step for each array.

        Args:
            name: of the array.
            reads: slots for each group; None for one that begins with nothing.
            writes: slots that each group will leave its states in, with :meth:`put`.
        """
        pending, self._pending[name] = self._pending.get(name, []), []
        at_hand = {p.slots: p.values for p in pending}
        overwritten = {slot for slots in writes for slot in slots}
        gathered = {slot for slots in reads if slots is not None and slots not in at_hand for slot in slots}
        self._write(name, pending, overwritten - gathered)
        states: list[mx.array | None] = []
        for slots in reads:
            values = None
            if slots is not None:
                values = at_hand[slots] if slots in at_hand else self.arrays[name][mx.array(slots)]
            states.append(values)
        return states

    def _write(self, name: str, pending: list[PendingStates], unwanted: set[int]) -> None:
        """Write pending states to their slots, but for those of slots that nobody reads before they are written."""
        kept = []
        for p in pending:
            wanted = [i for i, slot in enumerate(p.slots) if slot not in unwanted]
            if wanted:
                kept.append(p.only(wanted))
        if not kept:
            return
        slots = mx.array([slot for p in kept for slot in p.slots])
        values = kept[0].values if len(kept) == 1 else mx.concatenate([p.values for p in kept])
        array = self.arrays.pop(name)  # one owner at a time, so that the write is in place
        array[slots] = values
        self.arrays[name] = array

    def forget(self, slots: set[int]) -> None:
        """Give up what is pending for some slots: what is to be there comes from elsewhere."""
        for name, pending in self._pending.items():
            kept = [(p, [i for i, slot in enumerate(p.slots) if slot not in slots]) for p in pending]
            self._pending[name] = [p.only(wanted) for p, wanted in kept if wanted]

    def read(self, name: str, slots: list[int]) -> mx.array:
        """The states in some slots, as the steps built so far leave them, [len(slots), ...]."""
        pending = _rows(self._pending.get(name, []))
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


def _rows(pending: list[PendingStates]) -> dict[int, mx.array]:
    """By slot, the states [1, ...] that have not been written to the pool."""
    return {slot: p.values[i : i + 1] for p in pending for i, slot in enumerate(p.slots)}


def reads_of(groups: list[SegmentGroup]) -> list[Slots | None]:
    """What each group goes on from, for :meth:`RecurrentState.take`."""
    return [None if group.is_fresh else group.reads for group in groups]
