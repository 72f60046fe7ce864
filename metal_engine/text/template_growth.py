"""Costs of chat template filters and methods whose results can be larger than their arguments. Unit: characters.

A growth function is called with the arguments of its filter or method. The caller has already paid for the size of the
arguments. A number counts as the output that it can cause: a width of a million is a million characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from metal_engine.text.template_budget import STEP, TemplateBudgetError, current_budget, items_of, length

Growth = Callable[..., int]

# Maximum number of digits read from a width. More digits exceed every budget.
_MAX_DIGITS = 18
# Maximum characters of a float, and minimum cost of an integer, without a width.
_FLOAT_CHARS, _INT_CHARS = 330, 20
# Maximum buffer of the C library for a date, in bytes per character of the format. Python gives up beyond this size.
_DATE_BYTES = 256


def number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def sum_of_numbers(text: str) -> int:
    """Return the sum of all numbers in a format string: at least the sum of its widths and precisions."""
    return sum(int(digits[:_MAX_DIGITS]) for digits in re.findall(r"\d+", text))


def _text(value: Any) -> str:
    """Return the text to which a filter converts a value."""
    return value if isinstance(value, str) else str(value)


def _padded(text: Any, width: Any = 80, *_: Any, **__: Any) -> int:
    return number(width)


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    text, old = _text(text), _text(old)
    return (text.count(old) if old else len(text) + 1) * len(_text(new))


def _joined(separator: Any, items: Any = (), *_: Any, **__: Any) -> int:
    return length(items) * len(_text(separator))


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return (len(_text(text).splitlines()) + 1) * (number(width) or length(width))


def _wrapped(text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *_: Any) -> int:
    """Return the cost of inserting line breaks, in characters. Each break copies the rest of a long word."""
    num_chars = len(_text(text))
    return num_chars * length(wrapstring or "\n") + num_chars**2 // max(1, number(width))


def _summed(items: Any, attribute: Any = None, start: Any = 0) -> int:
    return STEP * length(items) ** 2 if length(start) or isinstance(start, list | tuple) else 0


def _sorted(items: Any, *_: Any, **__: Any) -> int:
    return STEP * length(items) * 32


def _listed(items: Any, *_: Any, **__: Any) -> int:
    return 4 * length(items)


def _sliced(items: Any, slices: Any, *_: Any, **__: Any) -> int:
    return STEP * number(slices) + _listed(items)


def _by_words(text: Any, *_: Any, **__: Any) -> int:
    """Return the cost of splitting into words. Each word is a Python object, and may be a single character."""
    return 16 * length(text)


def _unescaped(text: Any) -> int:
    return STEP * text.count("&")


def _stripped(text: Any, chars: Any = None, *_: Any, **__: Any) -> int:
    """Return the cost of stripping. Python compares each character of the text with the characters to strip."""
    return len(_text(text)) * length(chars) // 16


def _stripped_of_tags(text: Any) -> int:
    """Return the cost of removing tags. Removing a tag copies the rest of the text."""
    text = _text(text)
    return len(text) * text.count("<")


def formatted(text: Any, given: Any) -> int:
    """Return the cost of ``text % given``: all widths, and each value as often as placeholders can use it.

    With a ``*`` in ``text``, every number in ``given`` counts as a width.
    """
    if not isinstance(text, str | bytes):
        return 0
    spelled = text if isinstance(text, str) else text.decode("latin-1")
    total, numbers = _totals(given)
    places = spelled.count("%")
    stars = numbers if "*" in spelled else 0
    # Each placeholder uses one value of a tuple. A single value, or a named value, may be used by every placeholder.
    values = total if isinstance(given, tuple) else places * total
    return sum_of_numbers(spelled) + stars + values + places * STEP


def _totals(value: Any) -> tuple[int, int]:
    """Return the length of a value as text, and the sum of the integers in it. Spends the cost of the traversal."""
    total, numbers, waiting = 0, 0, [value]
    budget = current_budget()
    while waiting:
        item = waiting.pop()
        items = items_of(item)
        budget.spend(STEP)
        if items is not None:
            waiting += items
        elif isinstance(item, int):
            numbers += abs(item)
            total += item.bit_length() // 3
        else:
            total += _FLOAT_CHARS if isinstance(item, float) else length(item)
        total += _INT_CHARS
    return total, numbers


def dated(form: Any) -> int:
    """Return the memory for formatting a date, in bytes. Python tries larger and larger buffers."""
    return _DATE_BYTES * length(form)


def _json(value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, *_: Any) -> int:
    """Return the cost of indentation and separators in JSON: one of each for every item."""
    width = number(indent) or length(indent)
    between = sum(len(_text(one)) for one in separators) if length(separators) else 2
    total, waiting = 0, [(value, 1)]
    budget = current_budget()
    while waiting:
        item, depth = waiting.pop()
        items = items_of(item) or ()
        budget.spend(STEP * len(items))
        total += (depth * width + between) * (len(items) + 1)
        waiting += [(each, depth + 1) for each in items]
    return total


def _refused(*_: Any, **__: Any) -> int:
    raise TemplateBudgetError("the chat template may not call this method")


FILTER_GROWTH: dict[str, Growth] = {
    "batch": lambda items, linecount, *_: number(linecount), "center": _padded, "dictsort": _sorted,
    "format": lambda text, *args, **kwargs: formatted(text, kwargs or args), "groupby": _sorted, "indent": _indented,
    "join": lambda items, d="", *_, **__: _joined(d, items), "list": _listed, "replace": _replaced,
    "round": lambda value, precision=0, *_: number(precision) ** 2, "slice": _sliced, "sort": _sorted,
    "striptags": _stripped_of_tags, "sum": _summed, "title": _by_words, "tojson": _json, "trim": _stripped,
    "unique": _sorted, "wordcount": _by_words, "wordwrap": _wrapped,
}  # fmt: skip
# Methods by name. Methods of texts that are in neither table are refused.
METHOD_GROWTH: dict[str, Growth] = {
    "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded, "replace": _replaced, "join": _joined,
    "expandtabs": lambda text, tabsize=8: length(text) * number(tabsize), "split": _by_words, "rsplit": _by_words,
    "splitlines": _by_words, "unescape": _unescaped, "strip": _stripped, "lstrip": _stripped, "rstrip": _stripped,
    "striptags": _stripped_of_tags,
    "fromkeys": lambda kind, keys=(), *_: STEP * length(keys), "from_bytes": _refused, "to_bytes": _refused,
}  # fmt: skip
# Methods whose time and result are proportional to their input. Format methods charge the budget themselves.
LINEAR_TEXT_METHODS = frozenset(
    {
        "capitalize", "casefold", "count", "endswith", "escape", "find", "format", "format_map", "index", "isalnum",
        "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
        "istitle", "isupper", "lower", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition",
        "startswith", "swapcase", "title", "upper",
    }
)  # fmt: skip
