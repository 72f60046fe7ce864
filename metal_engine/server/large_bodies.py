"""Large request bodies, read and validated in pieces, so that no other thread waits long for Python's lock.

The event loop and the engine's steps share that lock with the thread that prepares a request, and one call into C
keeps it until it returns: parsing a million numbers takes 50 ms, validating 500,000 messages a second. Code in Python
gives it away every 5 ms. So a large body is taken apart in Python, and C sees pieces of a few milliseconds each.
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

# A body is large from so many bytes on, or so many commas, or objects and arrays, for each of which validation may make
# an object of its own: what has fewer is parsed and validated within 10 ms.
LARGE_BYTES = 1 << 20
LARGE_COMMAS = 1 << 14
LARGE_CONTAINERS = 1 << 13
ALWAYS_SMALL_BYTES = 1 << 15
# Elements validated in one call: 10 ms of the slowest kind, tools.
_ELEMENTS_AT_ONCE = 1 << 11
# Characters of an array of numbers, or of a text, parsed in one call: 2 ms; looked through in one call: 3 ms.
_CHARACTERS_AT_ONCE = 1 << 16
_BYTES_AT_ONCE = 1 << 20
# What a body may hold: each bound is 20 to 40 MiB of Python's objects, those that validation makes of them included.
MAX_CONTAINERS = 1 << 15
MAX_INTEGERS = 1 << 20
MAX_VALUES = 1 << 18
MAX_MEMBERS = 1 << 15  # pydantic looks at all members of an object in one go
# Python keeps all characters of a text as wide as the widest: this is one copy, and a body is parsed with two.
MAX_TEXT_BYTES = 24 << 20
# Of a JSON value within a body that is made JSON again: a text of that length takes 20 ms.
MAX_WITHIN = 1 << 21
# Of texts of JSON within a body: what so many characters hold takes 6 MiB at most, and need not be counted.
_SMALL_TEXTS = 1 << 18

_INTEGERS = re.compile(rf"[-\d\s,]{{0,{_CHARACTERS_AT_ONCE}}}", re.ASCII)
_LONG_NUMBER = re.compile(r"-?\d[\d.eE+-]{4400}")
_SPACE = re.compile(r"[ \t\n\r]*")
# Whole characters and escapes of a text; two escapes that make one character stay together.
_TEXT = re.compile(
    r"""(?: [^"\\\x00-\x1f]++
        | \\ ["\\/bfnrt]
        | \\u [dD][89abAB][0-9a-fA-F]{2} (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?=[^\\]) | (?=\\[^u]) )
        | \\u (?![dD][89abAB]) [0-9a-fA-F]{4}
        )*+""",
    re.VERBOSE,
)
# Escapes and raw bytes that might make lone surrogates; characters of four bytes, and of two, as Python keeps them.
# Patterns of their own: an alternation of both takes four times as long.
_HIGH_ESCAPE = re.compile(rb"\\u[dD][89abAB]")
_MAYBE_SURROGATE = (_HIGH_ESCAPE, re.compile(rb"\xed[\xa0-\xbf]"))
_WIDTHS = (
    (4, (_HIGH_ESCAPE, re.compile(rb"[\xf0-\xf4]"))),
    (2, (re.compile(rb"\\u(?!00)"), re.compile(rb"[\xc4-\xef]"))),
)
_LONGEST_MARK = 5  # bytes that these patterns look at


class TooComplexError(ValueError):
    """A body with more in it than any request needs."""


def is_large(body: bytes) -> bool:
    """Whether a body must be read and validated in pieces, outside the event loop."""
    if len(body) < ALWAYS_SMALL_BYTES:
        return False
    if len(body) >= LARGE_BYTES or body.count(b",") >= LARGE_COMMAS:
        return True
    return body.count(b"{") + body.count(b"[") >= LARGE_CONTAINERS


class PiecewiseDecoder(json.JSONDecoder):
    """Python's own JSON decoder, in Python but for pieces of texts and of arrays of integers.

    Raises:
        TooComplexError: there is more than the limits above allow.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_containers = self._num_integers = self._num_values = 0
        self._keys: dict[str, str] = {}  # of which there is one each, however often they come
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
            if text[at : at + 1] == "}" and sys.version_info >= (3, 13):  # as Python's own decoder says since then
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
                if not comma or len(match.group()) < _CHARACTERS_AT_ONCE:  # it has other things than integers
                    return JSONArray(text_and_start, self._scan)
            try:
                numbers = json.loads(f"[{piece}]")
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, text, at + error.pos - 1) from None
            if values and not numbers:  # nothing after a comma
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
            if end == at or end < at + _CHARACTERS_AT_ONCE - 12 or text[end : end + 1] == '"':  # its end, or a mistake
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
    """:func:`json.loads` for large bodies; in a thread. Raises what :class:`PiecewiseDecoder` raises, too."""
    _check_width(body)
    return json.loads(_decoded(body), cls=PiecewiseDecoder, **options)


class TextsDecoder(PiecewiseDecoder):
    """Decodes the JSON texts within one body: the limits hold for all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self._num_characters = 0

    def loads(self, text: str) -> Any:
        """:func:`json.loads`. Raises what :class:`PiecewiseDecoder` raises, too."""
        self._num_characters += len(text)
        is_small = len(text) <= ALWAYS_SMALL_BYTES and self._num_characters <= _SMALL_TEXTS
        return json.loads(text) if is_small else self.decode(text)


def dumps(value: Any) -> str:
    """:func:`json.dumps` in pieces, but for texts. Raises TooComplexError for more than ``MAX_WITHIN`` characters."""
    count = num_characters(value, limit=MAX_WITHIN)
    if count > MAX_WITHIN:
        raise TooComplexError(f"has more than {MAX_WITHIN} characters")
    if count <= MAX_WITHIN >> 2:  # in C: a tenth of the time, 5 ms at most
        return json.dumps(value)
    return "".join(json.JSONEncoder().iterencode(value))


def check_unicode(body: bytes, value: Any) -> None:
    """Raise UnicodeError if a text in a JSON value is not valid Unicode; ``body`` is what the value was read from."""
    if not _has(_MAYBE_SURROGATE, body):  # rare, so that most values are not looked at
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
    """The error of a piece as that of the whole list; ``start`` is where the piece begins."""
    details: list[Any] = []
    for one in error.errors(include_url=False)[:10]:
        index, *rest = one["loc"]
        loc = (index + start, *rest) if isinstance(index, int) else one["loc"]
        details.append({**one, "loc": loc})
    return ValidationError.from_exception_data(error.title, details)


# For lists that may be long.
IN_PIECES = WrapValidator(_in_pieces)
