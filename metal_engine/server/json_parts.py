"""Encoding of responses in parts, because log probabilities can be a hundred thousand objects of 1 kB each."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from pydantic import BaseModel


class Placeholder(BaseModel):
    """Placeholder in a response for a part that is encoded separately."""

    placeholder: str


class JSONParts:
    """Parts of one response that are encoded as JSON before the rest of the response."""

    def __init__(self) -> None:
        self._nonce = uuid.uuid4().hex  # no text of the response can equal a placeholder
        self._parts: list[tuple[bytes, bytes]] = []

    def add(self, json: bytes) -> Placeholder:
        """Store a part, which is a JSON value. Return its placeholder for the response.

        Call it in the order in which the placeholders occur in the response's JSON.
        """
        placeholder = Placeholder(placeholder=f"{self._nonce}-{len(self._parts)}")
        self._parts.append((placeholder.model_dump_json().encode(), json))
        return placeholder

    def encode(self, answer: BaseModel) -> bytes:
        """Return the response as JSON, with each placeholder replaced by its part.

        ``answer`` must contain every placeholder once, in the order of :meth:`add`.
        """
        whole = answer.model_dump_json().encode()
        pieces: list[bytes] = []
        end = 0  # of the previous placeholder
        for place, json in self._parts:
            start = whole.find(place, end)
            assert start >= 0, "a part has no place in the answer"
            pieces += [whole[end:start], json]
            end = start + len(place)
        return b"".join([*pieces, whole[end:]])


def array(slices: Iterable[bytes]) -> bytes:
    """Join several JSON arrays into one. Each array must be encoded without spaces around it."""
    return b"[" + b",".join(part[1:-1] for part in slices if len(part) > 2) + b"]"
