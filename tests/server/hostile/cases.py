"""Hostile requests, and cases generated for every field of every endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.fillers import ENDPOINTS, FILLERS, Endpoint, with_field, with_fields

JSON_TYPE = {"content-type": "application/json"}
# Large enough to reveal work that grows faster than the body, small enough for hundreds of cases.
FIELD_BYTES = 300_000


@dataclass(frozen=True)
class Case:
    """Hostile request.

    Attributes:
        body: makes the body at the time of sending, because some bodies have 15 MB.
        status: required status of the response; None allows any status below 500.
    """

    name: str
    method: str
    path: str
    body: Callable[[], bytes] = bytes
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_TYPE)


def attack(name: str, endpoint: Endpoint, status: int | None = None, **fields: Any) -> Case:
    """Return a case with the endpoint's small body and other fields.

    A function as a value is called at the time of sending.
    """

    def body() -> bytes:
        return with_fields(endpoint, **{key: value() if callable(value) else value for key, value in fields.items()})

    return Case(f"{endpoint.path}: {name}", "POST", endpoint.path, body, status)


def raw(name: str, endpoint: Endpoint, body: Callable[[], bytes], status: int | None = 400, **headers: str) -> Case:
    """Return a case with bytes that ``json`` would not write, or headers that do not match the body."""
    sent = JSON_TYPE | {name.replace("_", "-"): value for name, value in headers.items()}
    return Case(f"{endpoint.path}: {name}", "POST", endpoint.path, body, status, sent)


FIELDS = [(endpoint, name) for endpoint in ENDPOINTS for name in (*endpoint.fields, "an_unknown_one")]


def field_cases(endpoint: Endpoint, name: str) -> Iterator[Case]:
    """Yield cases with the field filled by many elements of each kind, by nesting and by text."""
    for filler, make in FILLERS.items():
        title = f"{endpoint.path}: {name} filled with {filler}"
        yield Case(title, "POST", endpoint.path, partial(_filled, endpoint, name, make))


def _filled(endpoint: Endpoint, name: str, make: Callable[[int], str]) -> bytes:
    return with_field(endpoint, name, make(FIELD_BYTES))
