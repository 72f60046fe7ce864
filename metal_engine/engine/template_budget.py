"""Bounds the work of rendering a chat template: a budget, and the costs of operations whose results outgrow them."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

from metal_engine.cancellation import check_cancelled

# Units of work: about a character that C code passes over. A step of Python takes as long as so many.
STEP = 64
# Beyond this, integers are slow to compute with; no template has use for them.
_MAX_BITS = 1 << 16
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
            elif (items := _items(item)) is not None:
                waiting += items
            self.spend(STEP)

    def glance(self, value: Any) -> None:
        """Spend the length of a value: what is paid where it is copied or searched, but not what it holds."""
        if isinstance(value, int):
            return self.read(value)
        self.spend(STEP + (len(value) if isinstance(value, str | bytes) else 8 * length(value)))


def check_bits(num_bits: int) -> None:
    """Raises TemplateBudgetError for an integer of so many bits, if it is too large to compute with."""
    if num_bits > _MAX_BITS:
        raise TemplateBudgetError("the chat template computes with numbers that are too large")


def _items(value: Any) -> list[Any] | None:
    """All that a container shows of itself; None for what is no container."""
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


# --- what grows -------------------------------------------------------------------------------------------
# What a filter or method makes beyond the size of its arguments, in characters.


def number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | range) else 0


def _padded(text: Any, width: Any = 80, *_: Any, **__: Any) -> int:
    return number(width)


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    if not isinstance(text, str) or not isinstance(old, str):
        return 0
    return (text.count(old) if old else len(text) + 1) * length(new)


def _joined(separator: Any, items: Any = (), *_: Any, **__: Any) -> int:
    return length(items) * length(separator)


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    lines = text.count("\n") + 1 if isinstance(text, str) else 1
    return lines * (number(width) or length(width))


def _wrapped(text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *_: Any) -> int:
    return length(text) * length(wrapstring or "\n")


def _summed(items: Any, attribute: Any = None, start: Any = 0) -> int:
    return STEP * length(items) ** 2 if length(start) or isinstance(start, list | tuple) else 0


def _sorted(items: Any, *_: Any, **__: Any) -> int:
    return STEP * length(items) * 32


def _stripped_of_tags(text: Any) -> int:
    return len(text) * text.count("<") if isinstance(text, str) else 0


def formatted(text: Any, *args: Any, **kwargs: Any) -> int:
    """Text made by ``%`` or ``format``: widths that are named or given, and values as often as there are places."""
    if not isinstance(text, str | bytes):
        return 0
    spelled = text if isinstance(text, str) else text.decode("latin-1")
    given: Any = (args, kwargs)
    widths = sum(int(digits[:18]) for digits in re.findall(r"\d+", spelled))
    times = spelled.count("%") + spelled.count("{")
    return widths + times * (_total(given) + STEP)


def _total(value: Any) -> int:
    """Size of a value, as far as the budget reaches, with the numbers in it for what they are as widths."""
    total, waiting = 0, [value]
    budget = _budget.get()
    while waiting:
        item = waiting.pop()
        items = _items(item)
        budget.spend(STEP)
        if items is not None:
            waiting += items
        total += length(item) if items is None else 0
        # A number as a value is short; as a width it is what it says. Ids and times are no widths that fit.
        total += item if isinstance(item, int) and 0 < item < 1 << 24 else 20
    return total


def _indentation(value: Any, ensure_ascii: Any = False, indent: Any = None, *_: Any, **__: Any) -> int:
    """Blanks that JSON on lines of its own begins with."""
    width = number(indent) or length(indent)
    if not width:
        return 0
    total, waiting = 0, [(value, 1)]
    budget = _budget.get()
    while waiting:
        item, depth = waiting.pop()
        items = _items(item) or ()
        budget.spend(STEP * len(items))
        total += depth * width * (len(items) + 1)
        waiting += [(each, depth + 1) for each in items]
    return total


def _refused(*_: Any, **__: Any) -> int:
    raise TemplateBudgetError("the chat template does what it may not")


FILTER_GROWTH: dict[str, Callable[..., int]] = {
    "center": _padded, "indent": _indented, "wordwrap": _wrapped, "replace": _replaced, "format": formatted,
    "join": lambda items, d="", *_, **__: _joined(d, items), "batch": lambda items, linecount, *_: number(linecount),
    "slice": lambda items, slices, *_: STEP * number(slices), "tojson": _indentation, "sum": _summed, "sort": _sorted,
    "dictsort": _sorted, "unique": _sorted, "groupby": _sorted, "striptags": _stripped_of_tags,
    "round": lambda value, precision=0, *_: number(precision) ** 2,
}  # fmt: skip
METHOD_GROWTH: dict[str, Callable[..., int]] = {
    "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded, "replace": _replaced, "join": _joined,
    "expandtabs": lambda text, tabsize=8: length(text) * number(tabsize), "format": formatted,
    "format_map": lambda text, mapping: formatted(text, mapping), "split": lambda text, *_, **__: 16 * length(text),
    "rsplit": lambda text, *_, **__: 16 * length(text), "splitlines": lambda text, *_, **__: 16 * length(text),
    "translate": _refused, "to_bytes": _refused, "encode": _refused,
}  # fmt: skip
