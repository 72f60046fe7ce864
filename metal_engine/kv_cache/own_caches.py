"""mlx-lm's own caches, held for each request, for models whose caches a packed step does not support.

A step never changes a cache that an earlier step has stored: it computes on a copy. The copy shares the arrays' memory,
so it costs nothing. A snapshot is therefore a copy of the dictionary from slots to caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from copy import deepcopy
from typing import Any

import mlx.core as mx

from metal_engine.kv_cache.recurrent import PendingByArray, RecurrentState
from metal_engine.kv_cache.spec import OwnCachesSpec
from metal_engine.kv_cache.state import StateSnapshot


def array_places(value: Any, seen: set[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield the place of each array within caches: the list or dictionary that holds the array, and its index or key.

    Searches lists, tuples, dictionaries and attributes recursively, each object once. The holder of an array in a tuple
    is a copy of the tuple as a list: assigning to the copy does not change the caches.

    Args:
        seen: ids of the objects that are already searched; None at the top level.
    """
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, tuple):
        value = list(value)  # an array in a tuple is found, but cannot be replaced
    inside = value if isinstance(value, list | dict) else getattr(value, "__dict__", {})
    for key, item in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
        if isinstance(item, mx.array):
            yield inside, key
        else:
            yield from array_places(item, seen)


def num_bytes(caches: Any) -> int:
    """Return the size in bytes of all arrays within caches. The arrays need not be evaluated."""
    return sum(holder[key].nbytes for holder, key in array_places(caches))


class OwnCachesState(RecurrentState):
    """mlx-lm's caches of all layers, for each state slot. The scheduler treats them like a recurrent state.

    Attributes:
        arrays: a placeholder, which exists while the pool is allocated.
    """

    spec: OwnCachesSpec  # type: ignore[assignment]

    def __init__(self, spec: OwnCachesSpec) -> None:
        super().__init__(spec)  # type: ignore[arg-type]
        self._caches: dict[int, list[Any]] = {}  # by slot

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int) -> None:
        self.arrays, self._caches = {"placeholder": mx.zeros((1 + num_state_slots,))}, {}

    def release(self) -> None:
        self.arrays, self._caches = {}, {}

    def snapshot(self) -> StateSnapshot:
        return StateSnapshot(dict(self.arrays), {"caches": dict(self._caches)})

    def restore(self, snapshot: StateSnapshot) -> None:
        self.arrays, self._caches = dict(snapshot.arrays), dict(snapshot.pending["caches"])

    def pending(self) -> list[mx.array]:
        # All arrays of all stored caches, not only arrays of the last step.
        return [holder[key] for holder, key in array_places(list(self._caches.values()))]

    def pending_states(self) -> PendingByArray:
        """Return an empty dictionary: only replay uses the result, and replay is disabled for these models."""
        return {}

    def forget(self, slots: set[int]) -> None:
        """Drop the caches of some slots."""
        self.keep(self._caches.keys() - slots)

    def keep(self, slots: Set[int]) -> None:
        """Drop the caches of all slots except ``slots``, which frees their memory."""
        if self._caches.keys() - slots:
            self._caches = {slot: caches for slot, caches in self._caches.items() if slot in slots}

    def copy_of(self, slot: int) -> list[Any]:
        """Return a copy of the caches in a slot, one per layer, for a step that extends them. Arrays are shared.

        Raises KeyError if the slot has no caches.
        """
        return deepcopy(self._caches[slot])

    def store(self, slot: int, caches: list[Any]) -> None:
        """Store the caches of a request after a step, one per layer, in a slot.

        The state takes over the objects. Their arrays are replaced by contiguous arrays, which are not evaluated yet.
        """
        for holder, key in array_places(caches):
            # A slice would keep its whole base array in memory, such as a window with all tokens of a chunk.
            holder[key] = mx.contiguous(holder[key])
        self._caches[slot] = caches
