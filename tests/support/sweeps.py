"""Parameters of sweeps, of which `make test` runs a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Return parameters of a test, and mark a value ``full`` unless ``quick`` returns True for it.

    A tuple has the values of several arguments.
    """
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.full) for case in cases]
