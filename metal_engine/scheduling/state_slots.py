"""Tracks the slots of recurrent states: states of running requests, and state checkpoints for later requests.

A recurrent layer stores only the state after the last computed token. A cached prefix can therefore be used only if the
state at its end was kept, as a *state checkpoint*. No state is copied for this: the slot becomes the checkpoint, and
the request that filled it continues in another slot. There are more slots than requests. The least recently used
checkpoint is evicted first.

Pure bookkeeping of slot numbers. The runner owns the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class StateSlots:
    """Slots 1 to ``num_slots``. A slot is free, or holds a request's state, a checkpoint, or a state that is both.

    A request can hold several slots, but two requests never hold the same slot. A checkpoint is found by the hash of
    the last block of its prefix.

    Args:
        num_slots: number of slots; 0 for models without recurrent layers.

    Attributes:
        num_hits: number of times that a request resumed from a state checkpoint.
        num_evictions: number of evicted state checkpoints.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._num_holders = [0] * (num_slots + 1)
        self._num_taken = 0
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._was_hit: set[bytes] = set()
        self.num_hits = 0
        self.num_evictions = 0

    @property
    def stats(self) -> dict[str, int]:
        """Fields of :class:`metal_engine.scheduling.stats.SchedulerStats` about state slots."""
        return {
            "num_state_slots": self.num_slots,
            "num_checkpoints": len(self._checkpoints),
            "checkpoint_hits": self.num_hits,
            "checkpoint_evictions": self.num_evictions,
        }

    @property
    def num_available(self) -> int:
        """Number of slots that :meth:`take` can return: free slots, and slots of checkpoints that no request holds."""
        return self.num_slots - self._num_taken

    @property
    def next_slot(self) -> int:
        """Slot that :meth:`take` returns next. At least one slot must be available."""
        return self._free[-1] if self._free else self._checkpoints[self._unused_for_longest()]

    def _unused_for_longest(self) -> bytes:
        # Evicting a checkpoint whose slot a request also holds would not free the slot.
        return next(h for h, slot in self._checkpoints.items() if self._num_holders[slot] == 1)

    def take(self) -> int:
        """Return a slot, which the request then holds. At least one slot must be available.

        If no slot is free, evicts the least recently used checkpoint whose slot no request holds.
        """
        if not self._free:
            self.num_evictions += 1
            self.drop_checkpoint(self._unused_for_longest())
        slot = self._free.pop()
        self._num_holders[slot] = 1
        self._num_taken += 1
        return slot

    def give_back(self, slot: int) -> None:
        """Release a slot that a request holds. A checkpoint in the slot stays."""
        self._num_taken -= 1
        self._release(slot)

    def _release(self, slot: int) -> None:
        self._num_holders[slot] -= 1
        assert self._num_holders[slot] >= 0, f"slot {slot} is free already"
        if not self._num_holders[slot]:
            self._free.append(slot)

    # --- checkpoints ---

    def longest(self, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """Return the length of the longest prefix with a state checkpoint, in blocks, at most ``max_blocks``.

        0 if no prefix has a state checkpoint.

        Args:
            block_hashes: hash chain of the request, at least ``max_blocks`` hashes.
        """
        return next((n for n in range(max_blocks, 0, -1) if block_hashes[n - 1] in self._checkpoints), 0)

    def has_checkpoint(self, block_hash: bytes) -> bool:
        return block_hash in self._checkpoints

    def slot_of(self, block_hash: bytes) -> int:
        """Return the slot of a state checkpoint. Raises KeyError without a checkpoint for ``block_hash``."""
        return self._checkpoints[block_hash]

    def resume_from(self, block_hash: bytes) -> int:
        """Return the slot of a state checkpoint from which a request resumes. Counts as a hit and as a use.

        Raises KeyError without a checkpoint for ``block_hash``.
        """
        self._checkpoints.move_to_end(block_hash)
        self._was_hit.add(block_hash)
        self.num_hits += 1
        return self._checkpoints[block_hash]

    def touch(self, block_hash: bytes) -> None:
        """Mark a state checkpoint as just used. Unknown hashes are ignored."""
        if block_hash in self._checkpoints:
            self._checkpoints.move_to_end(block_hash)

    def add_checkpoint(self, block_hash: bytes, slot: int) -> bool:
        """Make ``slot`` the state checkpoint of a prefix. Return False if another slot is the prefix's checkpoint.

        An existing checkpoint of the prefix counts as just used.

        Args:
            block_hash: hash of the prefix's last block.
        """
        if block_hash in self._checkpoints:
            self._checkpoints.move_to_end(block_hash)
            return self._checkpoints[block_hash] == slot
        self._checkpoints[block_hash] = slot
        self._num_holders[slot] += 1
        return True

    def drop_checkpoint(self, block_hash: bytes, *, unless_hit: bool = False) -> None:
        """Drop a state checkpoint. Unknown hashes are ignored.

        Args:
            unless_hit: True to keep the checkpoint if a request has resumed from it.
        """
        if block_hash in self._checkpoints and not (unless_hit and block_hash in self._was_hit):
            self._was_hit.discard(block_hash)
            self._release(self._checkpoints.pop(block_hash))

    def drop_checkpoint_in(self, slot: int) -> None:
        """Drop the state checkpoint in a slot, if there is one, because the slot is about to be overwritten."""
        for block_hash in [h for h, held in self._checkpoints.items() if held == slot]:
            self.drop_checkpoint(block_hash)

    def forget(self) -> None:
        """Drop all state checkpoints."""
        for block_hash in list(self._checkpoints):
            self.drop_checkpoint(block_hash)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Assert every invariant; for tests and debugging. ``held`` lists the slots that requests hold."""
        holders = [0] * (self.num_slots + 1)
        for slot in (*held, *self._checkpoints.values()):
            assert 1 <= slot <= self.num_slots
            holders[slot] += 1
        assert len(set(held)) == len(held) == self._num_taken, f"two requests hold one slot: {held}"
        assert holders == self._num_holders
        assert self._was_hit <= self._checkpoints.keys()
        assert sorted(self._free) == [slot for slot in range(1, self.num_slots + 1) if not holders[slot]]
