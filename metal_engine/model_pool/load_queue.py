"""Models that wait to be loaded, and the rule by which they go."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from metal_engine.model_pool.memory_budget import MemoryBudget
from metal_engine.model_pool.model_entry import Load, ModelEntry, ModelState


class LoadQueue:
    """Loads in the order in which they were asked for. Changes no model.

    A load goes when there is room for it at once, in free memory or in that of models that nobody uses. For the first
    one that finds none, models in use are closed: they get no new requests. Until they are gone, loads with room at
    once go before it, but for those of the models that were closed for it. After that nothing goes before it: so it
    waits for requests that were there when it came, and for those of models that were loaded meanwhile, and no longer.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._loads: list[Load] = []
        self.first: Load | None = None  # the one that models in use are closed for

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads)

    def __contains__(self, load: Load) -> bool:
        return load in self._loads

    def __bool__(self) -> bool:
        return bool(self._loads)

    def add(self, load: Load) -> None:
        """Put a load where it belongs: one that has been tried before goes back to its place."""
        bisect.insort(self._loads, load, key=lambda one: one.asked_at)

    def remove(self, load: Load) -> None:
        """Take a load out, if it is in."""
        if load in self._loads:
            self._loads.remove(load)
        if load is self.first:
            self.first = None

    def next(self) -> Load | None:
        """The load that is to begin now; None if there is none that may."""
        if self.first is not None and self.first.victims and not self._are_closing():
            self.first.is_due = True
        return next((load for load in self._loads if self._may_go(load)), None)

    def _may_go(self, load: Load) -> bool:
        entry, first = load.entry, self.first
        if entry.state is not ModelState.UNLOADED:
            return False
        if first is not None and load is not first and (first.is_due or entry in first.victims):
            return False
        return not self._lacks_room(load)

    def _lacks_room(self, load: Load) -> bool:
        """Whether a load is known to find no room at once; one that may not wait for any is told when it claims it."""
        return bool(load.num_bytes) and load.may_evict and not self._budget.has_room(load.entry, load.num_bytes)

    def _are_closing(self) -> bool:
        return self.first is not None and any(one.is_closing for one in self.first.victims)

    def close_for_first(self) -> list[ModelEntry]:
        """Models in use that are to be closed now for the first load that lacks room; they become its victims."""
        if self.first is None:
            lacking = (one for one in self._loads if one.entry.state is ModelState.UNLOADED and self._lacks_room(one))
            self.first = next(lacking, None)
        first = self.first
        if first is None or self._are_closing() or not self._lacks_room(first):
            return []
        # None while another is loaded, which cannot go: it is looked again when that is done.
        found = self._budget.victims(first.entry, first.num_bytes, also_used=True) or []
        first.victims = tuple(one for one in found if not one.is_idle)
        return list(first.victims)
