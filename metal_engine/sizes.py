"""Going through JSON values in Python: other threads go on meanwhile, and it ends where enough is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def num_characters(value: Any, *, per_value: int = 64, limit: float = math.inf) -> int:
    """The characters of all texts in a JSON value; stops once there are more than ``limit``.

    Args:
        per_value: what each value counts beside its characters: 64 is about what Python keeps of it, in bytes.
    """
    total = 0
    for one in parts(value):
        total += per_value + (len(one) if isinstance(one, str) else 0)
        if total > limit:
            break
    return total


def parts(value: Any) -> Iterator[Any]:
    """A JSON value and all values in it, names of members included; in no order."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
