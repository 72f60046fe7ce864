"""Limits on the content of request bodies, so that the memory of a parsed body is bounded.

Values are counted in the text before it is parsed: an empty array takes two bytes of text and 56 bytes of memory. A
call into C holds Python's global lock (GIL) for at most 0.15 s for a body of 16 MiB, and streams wait as long.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError, WrapValidator

from metal_engine.json_values import num_characters, parts

T = TypeVar("T")

# A body with at most this many bytes has no limits. It is parsed and validated within 10 ms.
ALWAYS_SMALL_BYTES = 1 << 15
# Limits on the content of a body. Each allows 20 to 40 MiB of Python objects, including those that validation makes.
MAX_CONTAINERS = 1 << 15
MAX_MEMBERS = 1 << 17
MAX_STRINGS = 1 << 18
MAX_VALUES = 1 << 20
# Maximum size of a body as a Python str, in which all characters are as wide as the widest. Parsing needs two copies.
MAX_TEXT_BYTES = 24 << 20
# Number of list elements validated in one call: 10 ms for tools, the slowest kind.
_ELEMENTS_AT_ONCE = 1 << 11
# Maximum length of a JSON value inside a body that is serialized again. Serializing that many characters takes 20 ms.
MAX_WITHIN = 1 << 21

_HIGH_OR_LOW_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# For each number of bytes per character in memory: the UTF-8 bytes of narrower characters, and a pattern of the JSON
# escapes of characters that are at least this wide.
_WIDTHS = ((4, bytes(range(0xF0)), re.compile(rb"\\u[dD][89abAB]")), (2, bytes(range(0xC4)), re.compile(rb"\\u(?!00)")))
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[{:,'))


# Calls that hold the GIL for long run one at a time, under this lock, with a pause after each.
_long_call_lock = threading.Lock()
_LONG_BYTES = 1 << 18
_PAUSE_SECONDS = 0.005
_MARKS_AT_ONCE = 1 << 18  # bytes split in one call, to bound the memory of the parts


def one_at_a_time(num_bytes: int, call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, a call into C that processes ``num_bytes`` bytes and holds the GIL all the time.

    Calls that process at least ``_LONG_BYTES`` run one at a time. Each call is followed by a pause of the same
    length, at most ``_PAUSE_SECONDS``. Without the pauses, a step of 16 streams would wait for 16 calls of up to
    0.15 s, because the event loop requests the GIL again after each write to a socket.
    """
    if num_bytes < _LONG_BYTES:
        return call(*args)
    with _long_call_lock:
        began = time.monotonic()
        try:
            return call(*args)
        finally:
            time.sleep(min(time.monotonic() - began, _PAUSE_SECONDS))


class TooComplexError(ValueError):
    """Raised for a body with more content than any request needs."""


class ContentLimits:
    """Counts of values in all JSON texts of one body together, with a limit on each count."""

    def __init__(self) -> None:
        self._num_containers = self._num_members = self._num_strings = self._num_values = 0

    def check(self, text: bytes) -> None:
        """Count the containers, members, strings and values of a JSON text in UTF-8. The text may be invalid JSON.

        Raises:
            TooComplexError: the texts together exceed a limit.
        """
        # After these replacements, each quote begins or ends a string.
        marks = one_at_a_time(len(text), text.replace, rb"\\", b"")
        marks = one_at_a_time(len(text), marks.replace, rb"\"", b"")
        marks = one_at_a_time(len(text), marks.translate, None, _NOT_STRUCTURE)
        self._num_strings += marks.count(b'"') // 2
        self._check(self._num_strings, MAX_STRINGS + MAX_MEMBERS, "strings")
        structure, is_in_string = bytearray(), False
        for start in range(0, len(marks), _MARKS_AT_ONCE):
            between = marks[start : start + _MARKS_AT_ONCE].split(b'"')
            structure += b"".join(between[is_in_string::2])
            is_in_string ^= len(between) % 2 == 0
        num_containers, num_members = structure.count(b"[") + structure.count(b"{"), structure.count(b":")
        self._num_containers += num_containers
        self._num_members += num_members
        self._num_strings -= num_members  # their names
        self._num_values += num_containers + structure.count(b",")
        self._check(self._num_containers, MAX_CONTAINERS, "arrays and objects")
        self._check(self._num_members, MAX_MEMBERS, "members")
        self._check(self._num_strings, MAX_STRINGS, "strings")
        self._check(self._num_values, MAX_VALUES, "values")

    @staticmethod
    def _check(number: int, limit: int, name: str) -> None:
        if number > limit:
            raise TooComplexError(f"has more than {limit} {name}")

    def loads(self, text: str) -> Any:
        """Count the content of one text, and parse it. Raises as :meth:`check` and :func:`json.loads`."""
        self.check(text.encode("utf-8", "surrogatepass"))
        return one_at_a_time(len(text), json.loads, text)


def loads(body: bytes, **options: Any) -> Any:
    """Parse a body like :func:`json.loads`. Call it in a thread for more than ``ALWAYS_SMALL_BYTES``.

    Args:
        options: keyword arguments for :func:`json.loads`.

    Raises:
        TooComplexError: the body is larger than ``ALWAYS_SMALL_BYTES``, and exceeds one of this module's limits.
        UnicodeError: the body has text that is not valid Unicode.
        ValueError, RecursionError: as :func:`json.loads`.
    """
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        body, encoding = body.decode(encoding).encode(), "utf-8"
    if len(body) > ALWAYS_SMALL_BYTES:
        _check_width(body)
        ContentLimits().check(body)
    text = one_at_a_time(len(body), body.decode, encoding)
    value = one_at_a_time(len(body), partial(json.loads, **options), text)
    if one_at_a_time(len(body), _HIGH_OR_LOW_SURROGATE.search, body):
        for one in parts(value):
            if isinstance(one, str):
                one.encode()
    return value


def _check_width(body: bytes) -> None:
    for width, narrow, escape in _WIDTHS:
        num_bytes = len(body)
        if width * num_bytes <= MAX_TEXT_BYTES:
            continue
        if one_at_a_time(num_bytes, body.translate, None, narrow) or one_at_a_time(num_bytes, escape.search, body):
            kind = "beyond U+FFFF" if width == 4 else "beyond U+00FF"
            raise TooComplexError(f"has characters {kind}: then it may have {MAX_TEXT_BYTES // width} bytes")


def dumps(value: Any) -> str:
    """Serialize a value like :func:`json.dumps`.

    Raises:
        TooComplexError: the result would have more than ``MAX_WITHIN`` characters.
    """
    if num_characters(value, limit=MAX_WITHIN) > MAX_WITHIN:
        raise TooComplexError(f"has more than {MAX_WITHIN} characters")
    return json.dumps(value)


def _in_pieces(value: Any, validate: Any) -> Any:
    """Validate a long list in pieces, so that other threads can run between the calls into pydantic."""
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
    """Return the first ten problems of a piece's error, with indices in the whole list.

    ``start`` is the index of the piece's first element in the list.
    """
    details: list[Any] = []
    for one in error.errors(include_url=False)[:10]:
        index, *rest = one["loc"]
        loc = (index + start, *rest) if isinstance(index, int) else one["loc"]
        details.append({**one, "loc": loc})
    return ValidationError.from_exception_data(error.title, details)


# Annotation for lists that may be long.
IN_PIECES = WrapValidator(_in_pieces)
