"""Traverses JSON values in Python code, which does not block other threads, and can stop early."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def num_characters(value: Any, *, per_value: int = 64, limit: float = math.inf) -> int:
    """Return the size of a JSON value: the characters of all its strings, and ``per_value`` for each value in it.

    Args:
        per_value: number to add for each value, including the names of members. 64 is about the memory of a Python
            object in bytes.
        limit: size above which the traversal stops. The result is then a number above ``limit``, not the whole size.
    """
    total = 0
    for one in parts(value):
        total += per_value + (len(one) if isinstance(one, str) else 0)
        if total > limit:
            break
    return total


def parts(value: Any) -> Iterator[Any]:
    """Iterate over a JSON value and all values in it, including the names of members, in no particular order."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
