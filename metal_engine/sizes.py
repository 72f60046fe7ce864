"""How large a JSON value is, found out in Python: other threads go on meanwhile, and it ends where it is known."""

from __future__ import annotations

import math
from typing import Any


def num_characters(value: Any, *, per_value: int = 64, limit: float = math.inf) -> int:
    """The characters of all texts in a JSON value; stops once there are more than ``limit``.

    Args:
        per_value: what each value counts beside its characters: 64 is about what Python keeps of it, in bytes.
    """
    total, left = 0, [value]
    while left and total <= limit:
        one = left.pop()
        total += per_value
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return total
