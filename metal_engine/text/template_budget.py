"""Bounds the work of rendering a chat template by a budget that everything spends from."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

from metal_engine.cancellation import check_cancelled

# Units of work: about a character that C code passes over. A step of Python takes as long as so many.
STEP = 64
# Larger integers are refused: the time of a division grows with the square of its bits. No template needs them.
_MAX_BITS = 1 << 12
# Work between two looks at whether the client is still there.
_LOOK_EVERY = 1 << 22


class TemplateBudgetError(Exception):
    """A rendering took too long or wrote too much."""


class Budget:
    """What a rendering may still spend, in units of work."""

    def __init__(self, work: int) -> None:
        self._left = work
        self._next_look = work

    def spend(self, work: int) -> None:
        """Take ``work`` off the budget. Raises TemplateBudgetError once nothing is left, Cancelled if nobody waits."""
        self._left -= work
        if self._left < self._next_look:
            if self._left < 0:
                raise TemplateBudgetError("the chat template took too long or wrote too much for these messages")
            self._next_look = self._left - _LOOK_EVERY
            check_cancelled()

    def read(self, value: Any) -> None:
        """Spend the size of a value: a text's length, or all that a container holds, as often as it holds it."""
        if type(value) is str:
            return self.spend(STEP + len(value))
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str | bytes):
                self.spend(len(item))
            elif isinstance(item, int):
                self.spend(item.bit_length() >> 3)
                check_bits(item.bit_length())
            elif isinstance(item, range):
                self.spend(STEP * len(item))
            elif (items := items_of(item)) is not None:
                waiting += items
            self.spend(STEP)

    def glance(self, value: Any) -> None:
        """Spend the length of a value: what is paid where it is copied or searched, but not what it holds."""
        if isinstance(value, int):
            return self.read(value)
        self.spend(STEP + (1 if isinstance(value, str | bytes) else 8) * length(value))


def length(value: Any) -> int:
    """Return the number of characters of a text, or of items of a container; 0 for other values."""
    sized = str | bytes | list | tuple | dict | range | set | frozenset | KeysView | ValuesView | ItemsView
    return len(value) if isinstance(value, sized) else 0


def check_bits(num_bits: int) -> None:
    """Raises TemplateBudgetError for an integer of so many bits, if it is too large to compute with."""
    if num_bits > _MAX_BITS:
        raise TemplateBudgetError("the chat template computes with numbers that are too large")


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a container, keys of a mapping too; None for another value."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return list(value)
    if isinstance(value, Namespace):
        return list(object.__getattribute__(value, "_Namespace__attrs").values())
    return None


_budget: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Let what is compiled or rendered within spend from ``budget``."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def current_budget() -> Budget:
    """The budget of the rendering under way in this thread."""
    return _budget.get()
