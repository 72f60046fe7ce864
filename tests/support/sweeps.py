"""Parameters of sweeps, of which `make test` runs a few."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], quick: Callable[..., bool] | Iterable[Any]) -> list[Any]:
    """Return parameters of a test, marked `full` unless they are quick. A tuple has the values of several arguments.

    Args:
        quick: the quick values, or a function that returns True for their arguments.
    """
    cases = [_arguments(value) for value in values]
    if callable(quick):
        are_quick = [quick(*case) for case in cases]
    else:
        left = [_arguments(value) for value in quick]
        are_quick = [case in left for case in cases]
        assert sum(are_quick) == len(left), "a quick case that is not a case"
    return [
        pytest.param(*case, marks=() if is_quick else pytest.mark.full)
        for case, is_quick in zip(cases, are_quick, strict=True)
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


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
