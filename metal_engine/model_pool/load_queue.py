"""Queue of model loads and the rule that picks the next one."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from metal_engine.model_pool.memory_budget import MemoryBudget
from metal_engine.model_pool.model_entry import Load, ModelEntry, ModelState


class LoadQueue:
    """Queued loads in the order of their requests. Changes no model.

    The rule that picks the next load:

    - A load may start if its memory is available at once: free, or held by idle models.
    - For the first load that lacks memory, models in use are closed: its victims. A closed model gets no new requests,
      and is unloaded after its last request.
    - Until the victims are unloaded, other loads that fit at once may start first, except loads of the victims.
    - Once the victims are unloaded, no other load may start before the first load.

    The first load therefore waits only for two kinds of requests: requests that were running when the load was
    requested, and requests of models that were loaded since then.

    Attributes:
        first: load that :meth:`close_for_first` has chosen. Models in use are closed for this load. None if no load is
            chosen.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._loads: list[Load] = []
        self.first: Load | None = None  # load for which models in use are closed

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads)

    def __contains__(self, load: Load) -> bool:
        return load in self._loads

    def __bool__(self) -> bool:
        return bool(self._loads)

    def add(self, load: Load) -> None:
        """Insert a load by the time of its request. A load that is retried returns to its place."""
        load.is_due = False  # a retried load can need additional victims
        bisect.insort(self._loads, load, key=lambda one: one.asked_at)

    def remove(self, load: Load) -> None:
        """Remove a load, if it is queued."""
        if load in self._loads:
            self._loads.remove(load)
        if load is self.first:
            self.first = None

    def next(self) -> Load | None:
        """Return the load to start now, or None if no load may start. The load stays in the queue."""
        if self.first is not None and self.first.victims and not self._are_closing():
            self.first.is_due = True
        return next((load for load in self._loads if self._may_go(load)), None)

    def _may_go(self, load: Load) -> bool:
        entry, first = load.entry, self.first
        if entry.state is not ModelState.UNLOADED:
            return False
        if first is not None and load is not first and (first.is_due or entry in first.victims):
            return False
        return not self._lacks_memory(load)

    def _lacks_memory(self, load: Load) -> bool:
        """Return True if the size of a load is known, and exceeds the free memory plus the memory of idle models.

        False for a load that may not evict: such a load starts, and fails when it claims its memory.
        """
        return bool(load.num_bytes) and load.may_evict and not self._budget.can_free(load.entry, load.num_bytes)

    def _are_closing(self) -> bool:
        return self.first is not None and any(one.is_closing for one in self.first.victims)

    def close_for_first(self) -> list[ModelEntry]:
        """Choose the models in use to close for the first load that lacks memory, and record them as its victims.

        Returns an empty list if no load lacks memory, if the victims are still being unloaded, or if even closing all
        models would not free enough memory.
        """
        if self.first is None:
            lacking = (one for one in self._loads if one.entry.state is ModelState.UNLOADED and self._lacks_memory(one))
            self.first = next(lacking, None)
        first = self.first
        if first is None or self._are_closing() or not self._lacks_memory(first):
            return []
        # No victims are found if a model that is being loaded holds too much memory. After its load, this is retried.
        found = self._budget.victims(first.entry, first.num_bytes, also_used=True) or []
        first.victims = tuple(one for one in found if not one.is_idle)
        return list(first.victims)
