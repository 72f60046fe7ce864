"""Who goes for whom, and which load goes next: rules, without threads or an event loop that runs."""

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
    """Models by name in a budget of 100 bytes, and a queue."""

    def __init__(self) -> None:
        self.entries: list[ModelEntry] = []
        self.budget = MemoryBudget(100, self.entries)
        self.queue = LoadQueue(self.budget)
        self.loop = asyncio.new_event_loop()
        self._num_asked = 0

    def add(self, name: str, num_bytes: int = 0, *, used: int = 0) -> ModelEntry:
        """One that has so many bytes; those added first were used longest ago."""
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
        """Close those that are to be closed."""
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
    assert made.victims(new, 10) == "", "so much is free"
    assert made.victims(new, 20) == "b"
    assert made.victims(new, 50) == "c", "b would not do, and need not go beside c"
    assert made.victims(new, 60) == "bc"
    assert made.victims(new, 61) == "ca", "those that nobody uses first"
    assert made.victims(new, 90) == "cad" and made.victims(new, 100) == "bcad"
    assert made.victims(new, 60, also_used=False) == "bc"
    assert made.victims(new, 61, also_used=False) is None, "not even all of them are enough: none goes"
    assert made.victims(new, 101) is None
    made.entries[0].state = ModelState.LOADING
    assert made.victims(new, 81) is None, "one that is being loaded does not go"


def test_one_that_goes_already_is_waited_for_before_another_goes(made: Made) -> None:
    made.add("a", 50)
    made.add("b", 50).is_closing = True
    assert made.victims(made.add("n"), 50) == "b"


def test_what_a_model_has_already_counts(made: Made) -> None:
    one = made.add("a", 60)
    made.add("b", 30)
    assert (made.budget.free_for(one), made.budget.taken_bytes) == (70, 90)
    assert made.victims(one, 70) == "" and made.victims(one, 71) == "b"
    with pytest.raises(ModelTooLargeError) as told:
        made.budget.check_fits(one, 103)
    assert told.value.missing_bytes == 3


def test_those_with_room_go_before_one_that_waits_until_its_room_is_made(made: Made) -> None:
    used = made.add("u", 60, used=1)
    idle = made.add("i", 20)
    large, small, other, unknown = (made.add(name) for name in "lsox")
    waits = made.ask(large, 90)
    again = made.ask(used, 60)
    assert made.queue.next() is None
    assert made.close() == "u", "the idle one stays as long as that is not enough"
    assert made.close() == "", "once is enough"
    fits, unknown_load = made.ask(small, 20), made.ask(unknown)
    assert made.queue.next() is fits
    made.queue.remove(fits)
    keep(small, 20)
    assert made.queue.next() is unknown_load, "whether it fits is told when it has been looked at"
    made.queue.remove(unknown_load)
    idle_goes = made.ask(other, 40)
    assert made.queue.next() is idle_goes, "its room is that of i and s, which nobody uses"
    small.num_leases = 1
    assert made.queue.next() is None
    # u is gone: nothing goes before the large one any more, neither u itself nor what fits.
    unload(used)
    assert made.budget.has_room(other, 40)
    assert made.queue.next() is None
    assert made.close() == "s", "it has been loaded meanwhile, and is used"
    unload(small)
    assert made.queue.next() is waits
    made.queue.remove(waits)
    unload(idle)
    keep(large, 90)
    large.num_leases = 1
    assert made.queue.next() is None
    assert made.close() == "l"
    assert list(made.queue) == [again, idle_goes]


def test_models_closed_for_a_load_do_not_come_back_before_it(made: Made) -> None:
    first, second = made.add("a", 50, used=1), made.add("b", 50, used=1)
    waits = made.ask(made.add("l"), 100)
    assert made.close() == "ab"
    made.ask(first, 50)
    unload(first)
    assert made.queue.next() is None, "a would fit"
    other = made.ask(made.add("o"), 50)
    assert made.queue.next() is other
    unload(second)
    assert made.queue.next() is waits


def test_when_the_one_that_waits_is_given_up_the_others_go(made: Made) -> None:
    made.add("u", 80, used=1)
    waits, small = made.ask(made.add("l"), 90), made.ask(made.add("s"), 10)
    assert made.close() == "u"
    waits.is_due = True
    assert made.queue.next() is None
    made.queue.remove(waits)
    assert made.queue.first is None and made.queue.next() is small


def test_one_that_was_tried_goes_back_to_its_place(made: Made) -> None:
    loads = [made.ask(made.add(name)) for name in "abc"]
    made.queue.remove(loads[0])
    made.queue.add(loads[0])
    assert list(made.queue) == loads and made.queue.next() is loads[0] and loads[1] in made.queue
