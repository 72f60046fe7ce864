"""Answers whose JSON is made in parts: log probabilities may be a hundred thousand objects, of a kilobyte each."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from pydantic import BaseModel


class Placeholder(BaseModel):
    """Stands in an answer where JSON comes that was made apart."""

    placeholder: str


class JSONParts:
    """Parts of one answer's JSON, made before the rest."""

    def __init__(self) -> None:
        self._nonce = uuid.uuid4().hex  # so that no text of the answer is taken for a place
        self._parts: list[tuple[bytes, bytes]] = []

    def add(self, json: bytes) -> Placeholder:
        """Takes a part; returns what stands for it in the answer. Parts must come in the answer's order."""
        placeholder = Placeholder(placeholder=f"{self._nonce}-{len(self._parts)}")
        self._parts.append((placeholder.model_dump_json().encode(), json))
        return placeholder

    def encode(self, answer: BaseModel) -> bytes:
        """The answer as JSON, with every part in its place."""
        rest = answer.model_dump_json().encode()
        pieces: list[bytes] = []
        for place, json in self._parts:
            before, found, rest = rest.partition(place)
            assert found, "a part has no place in the answer"
            pieces += [before, json]
        return b"".join([*pieces, rest])


_IDS_AT_ONCE = 1 << 16  # token ids made JSON in one call: 5 ms


def ids_json(ids: Sequence[int]) -> bytes:
    """A JSON array of any number of token ids."""
    parts = (ids[start : start + _IDS_AT_ONCE] for start in range(0, len(ids), _IDS_AT_ONCE))
    return b"[" + b",".join(",".join(map(str, part)).encode("ascii") for part in parts) + b"]"


def array(slices: Iterable[bytes]) -> bytes:
    """One JSON array of the elements of several, each encoded without spaces around it."""
    return b"[" + b",".join(part[1:-1] for part in slices if len(part) > 2) + b"]"
