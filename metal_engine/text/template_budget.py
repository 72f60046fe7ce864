"""Limits the work of rendering a chat template: every operation spends from one budget."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

from metal_engine.cancellation import check_cancelled

# Cost of a step of Python code in units of work. One unit is about one character processed by C code.
STEP = 64
# Maximum size of integers in bits. The time of a division grows with the square of the size.
_MAX_BITS = 1 << 12
# Units of work between two checks for cancellation.
_LOOK_EVERY = 1 << 22


class TemplateBudgetError(Exception):
    """Raised if a rendering takes too long, writes too much, or uses an operation whose cost has no bound."""


class Budget:
    """Remaining work of one rendering. A unit is about one character processed by C code; ``STEP`` is a Python step."""

    def __init__(self, work: int) -> None:
        self._left = work
        self._next_look = work

    def spend(self, work: int) -> None:
        """Subtract ``work`` from the budget.

        Raises:
            TemplateBudgetError: the budget is exhausted.
            Cancelled: the request was cancelled.
        """
        self._left -= work
        if self._left < self._next_look:
            if self._left < 0:
                raise TemplateBudgetError("the chat template took too long or wrote too much for these messages")
            self._next_look = self._left - _LOOK_EVERY
            check_cancelled()

    def read(self, value: Any) -> None:
        """Spend the cost of reading a whole value: its length for a text, the cost of all contents for a container.

        Contents that occur several times in a container are counted each time. Raises the errors of :meth:`spend` and
        :func:`check_bits`.
        """
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
        """Spend the cost of copying or searching a value: its length, without the sizes of its items."""
        if isinstance(value, int):
            return self.read(value)
        self.spend(STEP + (1 if isinstance(value, str | bytes) else 8) * length(value))


def length(value: Any) -> int:
    """Return the number of characters of a text, or of items of a container; 0 for other values."""
    sized = str | bytes | list | tuple | dict | range | set | frozenset | KeysView | ValuesView | ItemsView
    return len(value) if isinstance(value, sized) else 0


def check_bits(num_bits: int) -> None:
    """Raise TemplateBudgetError if an integer of ``num_bits`` bits is too large to compute with."""
    if num_bits > _MAX_BITS:
        raise TemplateBudgetError("the chat template computes with numbers that are too large")


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a container, including the keys of a mapping; None for other values."""
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
    """Make compiling and rendering spend from ``budget`` inside this context manager."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def current_budget() -> Budget:
    """Return the budget of the current rendering in this thread. Raises LookupError outside of :func:`spending`."""
    return _budget.get()
