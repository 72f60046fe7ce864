"""Reads and validates large request bodies in pieces, so that no thread holds Python's global lock (GIL) for long.

The event loop and the engine thread share the GIL with the thread that prepares a request. A call into C holds the GIL
until it returns: parsing a million numbers takes 50 ms, and validating 500,000 messages takes a second. Python code
releases the GIL every 5 ms. Therefore, a large body is split up in Python, and each call into C processes a piece that
takes a few milliseconds.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from json.decoder import JSONArray, scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from pydantic import ValidationError, WrapValidator

from metal_engine.sizes import num_characters, parts

# A body is large if it has at least this many bytes, commas, or objects and arrays. Validation may create a Python
# object for each object or array. A smaller body is parsed and validated within 10 ms.
LARGE_BYTES = 1 << 20
LARGE_COMMAS = 1 << 14
LARGE_CONTAINERS = 1 << 13
ALWAYS_SMALL_BYTES = 1 << 15  # a body with fewer bytes is never large
# Number of list elements validated in one call: 10 ms for tools, the slowest kind.
_ELEMENTS_AT_ONCE = 1 << 11
# Number of characters of a number array or a text parsed in one call, which takes 2 ms.
_CHARACTERS_AT_ONCE = 1 << 16
# Number of bytes searched or decoded in one call.
_BYTES_AT_ONCE = 1 << 20
# Limits on the content of a body. Each allows 20 to 40 MiB of Python objects, including those that validation makes.
MAX_CONTAINERS = 1 << 15
MAX_INTEGERS = 1 << 20
MAX_VALUES = 1 << 18
MAX_MEMBERS = 1 << 15  # pydantic processes all members of an object in one call
# Maximum size of a body as a Python str, in which all characters are as wide as the widest. Parsing needs two copies.
MAX_TEXT_BYTES = 24 << 20
# Maximum length of a JSON value inside a body that is serialized again. Serializing that many characters takes 20 ms.
MAX_WITHIN = 1 << 21
# Maximum total length of the JSON texts inside a body that are parsed without counting their values. These values take
# at most 6 MiB.
_SMALL_TEXTS = 1 << 18

_INTEGERS = re.compile(rf"[-\d\s,]{{0,{_CHARACTERS_AT_ONCE}}}", re.ASCII)
_LONG_NUMBER = re.compile(r"-?\d[\d.eE+-]{4400}")
_SPACE = re.compile(r"[ \t\n\r]*")
# Complete characters and escapes of a text. Both escapes of a surrogate pair stay together.
_TEXT = re.compile(
    r"""(?: [^"\\\x00-\x1f]++
        | \\ ["\\/bfnrt]
        | \\u [dD][89abAB][0-9a-fA-F]{2} (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?=[^\\]) | (?=\\[^u]) )
        | \\u (?![dD][89abAB]) [0-9a-fA-F]{4}
        )*+""",
    re.VERBOSE,
)
# Escapes and raw bytes that may produce lone surrogates; and characters that make Python store 4 or 2 bytes per
# character. The patterns are separate because an alternation of both takes four times as long.
_HIGH_ESCAPE = re.compile(rb"\\u[dD][89abAB]")
_MAYBE_SURROGATE = (_HIGH_ESCAPE, re.compile(rb"\xed[\xa0-\xbf]"))
_WIDTHS = (
    (4, (_HIGH_ESCAPE, re.compile(rb"[\xf0-\xf4]"))),
    (2, (re.compile(rb"\\u(?!00)"), re.compile(rb"[\xc4-\xef]"))),
)
_LONGEST_MARK = 5  # maximum length of a match of these patterns in bytes


class TooComplexError(ValueError):
    """Raised for a body with more content than any request needs."""


def is_large(body: bytes) -> bool:
    """Return True if a body must be read and validated in pieces, outside the event loop."""
    if len(body) < ALWAYS_SMALL_BYTES:
        return False
    if len(body) >= LARGE_BYTES or body.count(b",") >= LARGE_COMMAS:
        return True
    return body.count(b"{") + body.count(b"[") >= LARGE_CONTAINERS


class PiecewiseDecoder(json.JSONDecoder):
    """JSON decoder in pure Python that uses C only for pieces of texts and of integer arrays.

    Raises:
        TooComplexError: the body exceeds one of this module's limits.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_containers = self._num_integers = self._num_values = 0
        self._keys: dict[str, str] = {}  # one shared str for each key
        self.parse_array = self._array
        self.parse_object = self._object
        self.parse_string = self._string
        scan = py_make_scanner(self)

        def counting(text: str, at: int) -> tuple[Any, int]:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise TooComplexError(f"has more than {MAX_VALUES} values")
            if _LONG_NUMBER.match(text, at):
                raise TooComplexError("has a number with too many digits")
            return scan(text, at)

        self._scan = counting
        self.scan_once = scan

    def _count_container(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            raise TooComplexError(f"has more than {MAX_CONTAINERS} arrays and objects")

    def _object(self, text_and_start: tuple[str, int], strict: bool, *_options: Any) -> tuple[dict[str, Any], int]:
        self._count_container()
        text, at = text_and_start
        members: dict[str, Any] = {}
        at = _end_of_space(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        while True:
            if text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = self._string(text, at + 1, strict)
            at = _end_of_space(text, at)
            if text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
            at = _end_of_space(text, at + 1)
            try:
                value, at = self._scan(text, at)
            except StopIteration as stop:
                raise json.JSONDecodeError("Expecting value", text, stop.value) from None
            members[self._keys.setdefault(key, key)] = value
            if len(members) > MAX_MEMBERS:
                raise TooComplexError(f"has an object of more than {MAX_MEMBERS} members")
            at = _end_of_space(text, at)
            if text[at : at + 1] == "}":
                return members, at + 1
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            comma = at
            at = _end_of_space(text, at + 1)
            if text[at : at + 1] == "}" and sys.version_info >= (3, 13):  # Python's own decoder does this from 3.13 on
                raise json.JSONDecodeError("Illegal trailing comma before end of object", text, comma)

    def _array(self, text_and_start: tuple[str, int], _scan: Any) -> tuple[list[Any], int]:
        self._count_container()
        text, at = text_and_start
        values: list[Any] = []
        while True:
            match = _INTEGERS.match(text, at)
            assert match is not None
            piece, end = match.group(), match.end()
            is_last = text[end : end + 1] == "]"
            if not is_last:
                piece, comma, _ = piece.rpartition(",")
                end = at + len(piece)
                # the array contains other values than integers
                if not comma or len(match.group()) < _CHARACTERS_AT_ONCE:
                    return JSONArray(text_and_start, self._scan)
            try:
                numbers = json.loads(f"[{piece}]")
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, text, at + error.pos - 1) from None
            if values and not numbers:  # nothing follows the comma
                raise json.JSONDecodeError("Expecting value", text, end)
            self._num_integers += len(numbers)
            if self._num_integers > MAX_INTEGERS:
                raise TooComplexError(f"has more than {MAX_INTEGERS} integers")
            values += numbers
            at = end + 1
            if is_last:
                return values, at

    def _string(self, text: str, begin: int, strict: bool) -> tuple[str, int]:
        pieces: list[str] = []
        at = begin
        while True:
            match = _TEXT.match(text, at, at + _CHARACTERS_AT_ONCE)
            assert match is not None
            end = match.end()
            # end of the text, or a syntax error
            if end == at or end < at + _CHARACTERS_AT_ONCE - 12 or text[end : end + 1] == '"':
                try:
                    piece, after = scanstring(text, at, strict)
                except json.JSONDecodeError as error:
                    pos = begin - 1 if error.pos == at - 1 else error.pos
                    raise json.JSONDecodeError(error.msg, text, pos) from None
                return "".join([*pieces, piece]), after
            pieces.append(scanstring(text[at:end] + '"', 0, strict)[0])
            at = end


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _has(patterns: tuple[re.Pattern[bytes], ...], body: bytes) -> bool:
    starts = range(0, len(body), _BYTES_AT_ONCE)
    return any(
        pattern.search(body, start, start + _BYTES_AT_ONCE + _LONGEST_MARK) for start in starts for pattern in patterns
    )


def _check_width(body: bytes) -> None:
    for width, patterns in _WIDTHS:
        if width * len(body) > MAX_TEXT_BYTES and _has(patterns, body):
            kind = "beyond U+FFFF" if width == 4 else "beyond U+00FF"
            raise TooComplexError(f"has characters {kind}: then it may have {MAX_TEXT_BYTES // width} bytes")


def _decoded(body: bytes) -> str:
    decoder = codecs.getincrementaldecoder(json.detect_encoding(body))("surrogatepass")
    parts = [
        decoder.decode(body[start : start + _BYTES_AT_ONCE], start + _BYTES_AT_ONCE >= len(body))
        for start in range(0, len(body), _BYTES_AT_ONCE)
    ]
    return "".join(parts)


def loads(body: bytes, **options: Any) -> Any:
    """Parse a large body like :func:`json.loads`. Call it in a thread. Also raises TooComplexError."""
    _check_width(body)
    return json.loads(_decoded(body), cls=PiecewiseDecoder, **options)


class TextsDecoder(PiecewiseDecoder):
    """Decodes the JSON texts inside one body. The limits apply to all these texts together."""

    def __init__(self) -> None:
        super().__init__()
        self._num_characters = 0

    def loads(self, text: str) -> Any:
        """Parse one text like :func:`json.loads`. Also raises TooComplexError."""
        self._num_characters += len(text)
        is_small = len(text) <= ALWAYS_SMALL_BYTES and self._num_characters <= _SMALL_TEXTS
        return json.loads(text) if is_small else self.decode(text)


def dumps(value: Any) -> str:
    """Serialize a value like :func:`json.dumps`, in pieces. Each string is one piece.

    Raises:
        TooComplexError: the result would have more than ``MAX_WITHIN`` characters.
    """
    count = num_characters(value, limit=MAX_WITHIN)
    if count > MAX_WITHIN:
        raise TooComplexError(f"has more than {MAX_WITHIN} characters")
    if count <= MAX_WITHIN >> 2:  # the C encoder takes a tenth of the time, at most 5 ms
        return json.dumps(value)
    return "".join(json.JSONEncoder().iterencode(value))


def check_unicode(body: bytes, value: Any) -> None:
    """Raise UnicodeError if a string in a JSON value is not valid Unicode. ``body`` is the JSON text of the value."""
    if not _has(_MAYBE_SURROGATE, body):  # usual case: skip the walk over the value
        return
    for one in parts(value):
        if isinstance(one, str):
            one.encode()


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
    """Convert the indices in a piece's error to indices in the list. ``start`` is the piece's position in the list."""
    details: list[Any] = []
    for one in error.errors(include_url=False)[:10]:
        index, *rest = one["loc"]
        loc = (index + start, *rest) if isinstance(index, int) else one["loc"]
        details.append({**one, "loc": loc})
    return ValidationError.from_exception_data(error.title, details)


# Annotation for lists that may be long.
IN_PIECES = WrapValidator(_in_pieces)
