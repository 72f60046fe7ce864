"""Parameters of sweeps, of which `make test` runs a few."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Return parameters of a test, and mark a value ``full`` unless ``quick`` returns True for it.

    A tuple has the values of several arguments.
    """
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.full) for case in cases]


def mostly_full(cases: Iterable[tuple[Any, ...]], quick: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases as parameters, marked `full` unless they are among the quick ones."""
    left = list(quick)
    found = [pytest.param(*case, marks=() if case in left else pytest.mark.full) for case in map(tuple, cases)]
    assert sum(not param.marks for param in found) == len(left), "a quick case that is not a case"
    return found


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters, marked `full` apart from a diagonal, which has each value of each axis.

    A value may be a ``pytest.param`` with an id.
    """
    values = [list(axis) for axis in axes]
    quick = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    cases = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        parts = [axis[i] for axis, i in zip(values, place, strict=True)]
        ids = [getattr(part, "id", None) or getattr(part, "__name__", None) or str(part) for part in parts]
        flat = [v for part in parts for v in (part.values if isinstance(part, type(pytest.param(0))) else (part,))]
        cases.append(pytest.param(*flat, id="-".join(ids), marks=() if place in quick else pytest.mark.full))
    return cases
