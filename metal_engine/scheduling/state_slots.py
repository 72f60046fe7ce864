"""Keeps book of the slots of recurrent states: of running requests, and of checkpoints that later requests go on from.

A recurrent layer keeps no more of a prompt than the state after its last token. So a cached prefix is of use only where
its state was kept, too: a *checkpoint*, which is a slot handed over. The request that has filled it goes on in another
one, and nothing is copied. Checkpoints have slots beside those of requests, and the one unused for longest gives way.

Pure bookkeeping over slot numbers; the memory itself belongs to the runner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class StateSlots:
    """Slots 1 to ``num_slots``, each free, or held: by a request, as a checkpoint, or both.

    Args:
        num_slots: 0 for models that carry no state from token to token.

    Attributes:
        num_hits: how often a request went on from a checkpoint.
        num_evictions: checkpoints that gave way.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._num_holders = [0] * (num_slots + 1)
        self._num_taken = 0
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()  # the one unused for longest first
        self._was_hit: set[bytes] = set()
        self.num_hits = 0
        self.num_evictions = 0

    @property
    def stats(self) -> dict[str, int]:
        """What :class:`metal_engine.scheduling.stats.SchedulerStats` says of them."""
        return {
            "num_state_slots": self.num_slots,
            "num_checkpoints": len(self._checkpoints),
            "checkpoint_hits": self.num_hits,
            "checkpoint_evictions": self.num_evictions,
        }

    @property
    def num_available(self) -> int:
        """Slots that :meth:`take` has to give: free ones, and those of checkpoints that no request holds."""
        return self.num_slots - self._num_taken

    @property
    def next_slot(self) -> int:
        """The slot that :meth:`take` gives next; there must be one available."""
        return self._free[-1] if self._free else self._checkpoints[self._unused_for_longest()]

    def _unused_for_longest(self) -> bytes:
        # One that a request holds, too, would free nothing.
        return next(h for h, slot in self._checkpoints.items() if self._num_holders[slot] == 1)

    def take(self) -> int:
        """Returns a slot for a request; there must be one available."""
        if not self._free:
            self.num_evictions += 1
            self.drop_checkpoint(self._unused_for_longest())
        slot = self._free.pop()
        self._num_holders[slot] = 1
        self._num_taken += 1
        return slot

    def give_back(self, slot: int) -> None:
        """Called when a request holds a slot no longer."""
        self._num_taken -= 1
        self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        self._num_holders[slot] -= 1
        assert self._num_holders[slot] >= 0, f"slot {slot} is free already"
        if not self._num_holders[slot]:
            self._free.append(slot)

    # --- checkpoints ---

    def longest(self, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """Blocks of the longest beginning of a chain, ``max_blocks`` at most, after which there is a checkpoint."""
        return next((n for n in range(max_blocks, 0, -1) if block_hashes[n - 1] in self._checkpoints), 0)

    def has_checkpoint(self, block_hash: bytes) -> bool:
        return block_hash in self._checkpoints

    def slot_of(self, block_hash: bytes) -> int:
        """The slot of a checkpoint."""
        return self._checkpoints[block_hash]

    def hit(self, block_hash: bytes) -> int:
        """Returns the slot of a checkpoint that a request is about to go on from."""
        self._checkpoints.move_to_end(block_hash)
        self._was_hit.add(block_hash)
        self.num_hits += 1
        return self._checkpoints[block_hash]

    def touch(self, block_hash: bytes) -> None:
        """Count a checkpoint as used now; one that is not there is ignored."""
        if block_hash in self._checkpoints:
            self._checkpoints.move_to_end(block_hash)

    def add_checkpoint(self, block_hash: bytes, slot: int) -> bool:
        """Make what a slot holds the checkpoint of a prefix; returns False if there is one already."""
        if block_hash in self._checkpoints:
            self._checkpoints.move_to_end(block_hash)
            return self._checkpoints[block_hash] == slot
        self._checkpoints[block_hash] = slot
        self._was_hit.discard(block_hash)
        self._num_holders[slot] += 1
        return True

    def drop_checkpoint(self, block_hash: bytes, *, unless_hit: bool = False) -> None:
        """Forget a checkpoint; one that is not there is ignored."""
        if block_hash in self._checkpoints and not (unless_hit and block_hash in self._was_hit):
            self._let_go(self._checkpoints.pop(block_hash))

    def drop_checkpoint_in(self, slot: int) -> None:
        """Forget the checkpoint in a slot, if there is one: what the slot holds is about to change."""
        for block_hash in [h for h, held in self._checkpoints.items() if held == slot]:
            self.drop_checkpoint(block_hash)

    def forget(self) -> None:
        """Forget all checkpoints."""
        for block_hash in list(self._checkpoints):
            self.drop_checkpoint(block_hash)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Assert every invariant; ``held`` has the slots that requests hold. For tests and debugging."""
        holders = [0] * (self.num_slots + 1)
        for slot in (*held, *self._checkpoints.values()):
            assert 1 <= slot <= self.num_slots
            holders[slot] += 1
        assert len(set(held)) == len(held) == self._num_taken, f"two requests hold one slot: {held}"
        assert holders == self._num_holders
        assert sorted(self._free) == [slot for slot in range(1, self.num_slots + 1) if not holders[slot]]
