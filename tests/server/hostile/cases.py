"""A hostile request, and those that are made for every field of every endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.fillers import ENDPOINTS, FILLERS, Endpoint, with_field, with_fields

JSON_TYPE = {"content-type": "application/json"}
# Large enough for work that grows faster than the body to show, small enough for hundreds of them.
FIELD_BYTES = 300_000


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        body: makes the body, when it is sent: some have 15 MB.
        status: what it must be answered with; None for anything but a 5xx.
    """

    name: str
    method: str
    path: str
    body: Callable[[], bytes] = bytes
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_TYPE)


def attack(name: str, endpoint: Endpoint, status: int | None = None, **fields: Any) -> Case:
    """The endpoint's small body with other fields. One that is a function is called for its value when it is sent."""

    def body() -> bytes:
        return with_fields(endpoint, **{key: value() if callable(value) else value for key, value in fields.items()})

    return Case(f"{endpoint.path}: {name}", "POST", endpoint.path, body, status)


def raw(name: str, endpoint: Endpoint, body: Callable[[], bytes], status: int | None = 400, **headers: str) -> Case:
    """Bytes that ``json`` would not write, or headers that do not fit them."""
    sent = JSON_TYPE | {name.replace("_", "-"): value for name, value in headers.items()}
    return Case(f"{endpoint.path}: {name}", "POST", endpoint.path, body, status, sent)


FIELDS = [(endpoint, name) for endpoint in ENDPOINTS for name in (*endpoint.fields, "an_unknown_one")]


def field_cases(endpoint: Endpoint, name: str) -> Iterator[Case]:
    """A field filled with many elements of each kind, with depth and with text."""
    for filler, make in FILLERS.items():
        title = f"{endpoint.path}: {name} filled with {filler}"
        body = partial(_filled, endpoint, name, make)
        yield Case(title, "POST", endpoint.path, body)


def _filled(endpoint: Endpoint, name: str, make: Callable[[int], str]) -> bytes:
    return with_field(endpoint, name, make(FIELD_BYTES))
