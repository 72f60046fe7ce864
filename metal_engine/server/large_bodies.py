"""Large request bodies, read and validated in pieces, so that no other thread waits long for Python's lock.

The event loop and the engine's steps share that lock with the thread that prepares a request, and one call into C
keeps it until it returns: parsing a million numbers takes 50 ms, validating 500,000 messages a second. Code in Python
gives it away every 5 ms. So a large body is taken apart in Python, and C sees pieces of a few milliseconds each.
"""

from __future__ import annotations

import json
import re
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from pydantic import ValidationError, WrapValidator

# A body is large from so many bytes on, or from so many commas: what has fewer is parsed and validated within 10 ms.
LARGE_BYTES = 1 << 20
LARGE_COMMAS = 1 << 14
_ALWAYS_SMALL_BYTES = 1 << 15
# Elements validated in one call: 10 ms of the slowest kind, messages.
_ELEMENTS_AT_ONCE = 1 << 12
# Characters of an array of numbers parsed in one call: 2 ms.
_CHARACTERS_AT_ONCE = 1 << 16
# Python's garbage collector looks at all arrays and objects in one go.
MAX_CONTAINERS = 1 << 16
# pydantic looks at all members of an object in one go.
MAX_MEMBERS = 1 << 15

_NUMBERS = re.compile(rf"[-\d\s,]{{0,{_CHARACTERS_AT_ONCE}}}", re.ASCII)


class TooComplexError(Exception):
    """A body with more arrays and objects, or larger objects, than any request needs."""


def is_large(body: bytes) -> bool:
    """Whether a body must be read and validated in pieces, outside the event loop."""
    if len(body) < _ALWAYS_SMALL_BYTES:
        return False
    return len(body) >= LARGE_BYTES or body.count(b",") >= LARGE_COMMAS


class PiecewiseDecoder(json.JSONDecoder):
    """Python's own JSON decoder, in Python but for strings and for pieces of arrays of integers.

    Raises:
        TooComplexError: there are more than ``MAX_CONTAINERS`` arrays and objects, or one has more than
            ``MAX_MEMBERS`` members.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_containers = 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = py_make_scanner(self)

    def _count(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            raise TooComplexError(f"has more than {MAX_CONTAINERS} arrays and objects")

    def _object(self, text_and_start: tuple[str, int], *options: Any) -> tuple[Any, int]:
        self._count()
        members, end = JSONObject(text_and_start, *options)
        if len(members) > MAX_MEMBERS:
            raise TooComplexError(f"has an object of more than {MAX_MEMBERS} members")
        return members, end

    def _array(self, text_and_start: tuple[str, int], scan_once: Any) -> tuple[list[Any], int]:
        self._count()
        text, at = text_and_start
        values: list[Any] = []
        while True:
            match = _NUMBERS.match(text, at)
            assert match is not None
            piece, end = match.group(), match.end()
            is_last = text[end : end + 1] == "]"
            if not is_last:
                piece, comma, _ = piece.rpartition(",")
                end = at + len(piece)
                if not comma or len(match.group()) < _CHARACTERS_AT_ONCE:  # it has other things than integers
                    return JSONArray(text_and_start, scan_once)
            try:
                numbers = json.loads(f"[{piece}]")
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, text, at + error.pos - 1) from None
            if values and not numbers:  # nothing after a comma
                raise json.JSONDecodeError("Expecting value", text, end)
            values += numbers
            at = end + 1
            if is_last:
                return values, at


def loads(body: bytes, **options: Any) -> Any:
    """:func:`json.loads` for large bodies; in a thread. Raises what :class:`PiecewiseDecoder` raises, too."""
    return json.loads(body, cls=PiecewiseDecoder, **options)


def check_unicode(value: Any, *, is_large: bool) -> None:
    """Raise UnicodeError if a text in a JSON value is not valid Unicode."""
    encoder = json.JSONEncoder(ensure_ascii=False)
    for piece in encoder.iterencode(value) if is_large else (encoder.encode(value),):
        piece.encode()


def _in_pieces(value: Any, validate: Any) -> Any:
    if not isinstance(value, list) or len(value) <= _ELEMENTS_AT_ONCE:
        return validate(value)
    validated: list[Any] = []
    for start in range(0, len(value), _ELEMENTS_AT_ONCE):
        try:
            validated += validate(value[start : start + _ELEMENTS_AT_ONCE])
        except ValidationError as error:
            raise _moved(error, start) from None
    return validated


def _moved(error: ValidationError, start: int) -> ValidationError:
    """The error of a piece as that of the whole list; ``start`` is where the piece begins."""
    details: list[Any] = []
    for one in error.errors(include_url=False)[:10]:
        index, *rest = one["loc"]
        loc = (index + start, *rest) if isinstance(index, int) else one["loc"]
        details.append({**one, "loc": loc})
    return ValidationError.from_exception_data(error.title, details)


# For lists that may be long.
IN_PIECES = WrapValidator(_in_pieces)
