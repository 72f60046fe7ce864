"""The rules for choosing victims and the next load, without threads or a running event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from metal_engine.errors import ModelTooLargeError
from metal_engine.model_pool.load_queue import LoadQueue
from metal_engine.model_pool.memory_budget import MemoryBudget
from metal_engine.model_pool.model_entry import Load, ModelEntry, ModelSource, ModelState


def never(*_: Any) -> Any:
    raise AssertionError("nothing is loaded here")


class Made:
    """Models by name with a budget of 100 bytes, and a load queue."""

    def __init__(self) -> None:
        self.entries: list[ModelEntry] = []
        self.budget = MemoryBudget(100, self.entries)
        self.queue = LoadQueue(self.budget)
        self.loop = asyncio.new_event_loop()
        self._num_asked = 0

    def add(self, name: str, num_bytes: int = 0, *, used: int = 0) -> ModelEntry:
        """Add a model that takes ``num_bytes``. Models added first were used longest ago."""
        state = ModelState.LOADED if num_bytes else ModelState.UNLOADED
        entry = ModelEntry(name, ModelSource(never), state, num_bytes=num_bytes, num_leases=used)
        entry.last_used = float(len(self.entries))
        self.entries.append(entry)
        return entry

    def ask(self, entry: ModelEntry, num_bytes: int = 0) -> Load:
        self._num_asked += 1
        load = Load(entry, self.loop.create_future(), num_bytes=num_bytes, asked_at=float(self._num_asked))
        self.queue.add(load)
        return load

    def victims(self, entry: ModelEntry, num_bytes: int, *, also_used: bool = True) -> str | None:
        found = self.budget.victims(entry, num_bytes, also_used=also_used)
        return None if found is None else "".join(one.name for one in found)

    def close(self) -> str:
        """Close the models that the queue chooses. Return their names."""
        closed = self.queue.close_for_first()
        for one in closed:
            one.is_closing = True
        return "".join(one.name for one in closed)


def unload(entry: ModelEntry) -> None:
    entry.state, entry.num_bytes, entry.num_leases, entry.is_closing = ModelState.UNLOADED, 0, 0, False


def keep(entry: ModelEntry, num_bytes: int) -> None:
    entry.state, entry.num_bytes = ModelState.LOADED, num_bytes


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    made.loop.close()


def test_victims_are_one_set_that_makes_room(made: Made) -> None:
    for name, num_bytes, used in [("a", 20, 1), ("b", 10, 0), ("c", 40, 0), ("d", 20, 2)]:
        made.add(name, num_bytes, used=used)
    new = made.add("n")
    assert made.victims(new, 10) == "", "this much is free"
    assert made.victims(new, 20) == "b"
    assert made.victims(new, 50) == "c", "c is enough, so b stays"
    assert made.victims(new, 60) == "bc"
    assert made.victims(new, 61) == "ca", "idle models first"
    assert made.victims(new, 90) == "cad" and made.victims(new, 100) == "bcad"
    assert made.victims(new, 60, also_used=False) == "bc"
    assert made.victims(new, 61, also_used=False) is None, "all idle models are not enough, so none is unloaded"
    assert made.victims(new, 101) is None
    made.entries[0].state = ModelState.LOADING
    assert made.victims(new, 81) is None, "a model that is being loaded is not a victim"


def test_a_model_that_is_already_closing_is_the_first_victim(made: Made) -> None:
    made.add("a", 50)
    made.add("b", 50).is_closing = True
    assert made.victims(made.add("n"), 50) == "b"


def test_memory_that_a_model_already_holds_counts_as_available(made: Made) -> None:
    one = made.add("a", 60)
    made.add("b", 30)
    assert (made.budget.free_for(one), made.budget.taken_bytes) == (70, 90)
    assert made.victims(one, 70) == "" and made.victims(one, 71) == "b"
    with pytest.raises(ModelTooLargeError) as told:
        made.budget.check_fits(one, 103)
    assert told.value.missing_bytes == 3


def test_loads_that_fit_start_first_until_a_victim_of_a_waiting_load_unloads(made: Made) -> None:
    used = made.add("u", 60, used=1)
    idle = made.add("i", 20)
    large, small, other, unknown = (made.add(name) for name in "lsox")
    waits = made.ask(large, 90)
    again = made.ask(used, 60)
    assert made.queue.next() is None
    assert made.close() == "u", "i stays while unloading it is not enough"
    assert made.close() == "", "no second model is closed"
    fits, unknown_load = made.ask(small, 20), made.ask(unknown)
    assert made.queue.next() is fits
    made.queue.remove(fits)
    keep(small, 20)
    assert made.queue.next() is unknown_load, "its size is unknown until it is loaded"
    made.queue.remove(unknown_load)
    idle_goes = made.ask(other, 40)
    assert made.queue.next() is idle_goes, "the idle models i and s make room for it"
    small.num_leases = 1
    assert made.queue.next() is None
    # u is unloaded: from now on, no load goes before the large one, neither u nor a load that fits.
    unload(used)
    assert made.budget.can_free(other, 40)
    assert made.queue.next() is None
    assert made.close() == "s", "s was loaded in the meantime and is in use"
    unload(small)
    assert made.queue.next() is waits
    made.queue.remove(waits)
    unload(idle)
    keep(large, 90)
    large.num_leases = 1
    assert made.queue.next() is None
    assert made.close() == "l"
    assert list(made.queue) == [again, idle_goes]


def test_models_closed_for_a_load_are_not_reloaded_before_that_load(made: Made) -> None:
    first, second = made.add("a", 50, used=1), made.add("b", 50, used=1)
    waits = made.ask(made.add("l"), 100)
    assert made.close() == "ab"
    made.ask(first, 50)
    unload(first)
    assert made.queue.next() is None, "a would fit, but must wait for l"
    other = made.ask(made.add("o"), 50)
    assert made.queue.next() is other
    unload(second)
    assert made.queue.next() is waits


def test_other_loads_start_when_the_waiting_load_is_cancelled(made: Made) -> None:
    made.add("u", 80, used=1)
    waits, small = made.ask(made.add("l"), 90), made.ask(made.add("s"), 10)
    assert made.close() == "u"
    waits.is_due = True
    assert made.queue.next() is None
    made.queue.remove(waits)
    assert made.queue.first is None and made.queue.next() is small


def test_a_load_that_is_queued_again_keeps_the_original_position(made: Made) -> None:
    loads = [made.ask(made.add(name)) for name in "abc"]
    made.queue.remove(loads[0])
    made.queue.add(loads[0])
    assert list(made.queue) == loads and made.queue.next() is loads[0] and loads[1] in made.queue


def test_a_load_that_claims_more_memory_than_known_waits_again(made: Made) -> None:
    """Loads that fit at once may start first again, until the additional victims are unloaded."""
    used, other = made.add("u", 50, used=1), made.add("v", 30, used=1)
    waits = made.ask(made.add("l"), 60)
    assert made.close() == "u"
    unload(used)
    assert made.queue.next() is waits
    made.queue.remove(waits)
    waits.victims, waits.num_bytes = (), 80  # the load claims more memory
    made.queue.add(waits)
    small = made.ask(made.add("s"), 20)
    assert made.close() == "v"
    assert made.queue.next() is small
    unload(other)
    assert made.queue.next() is waits
