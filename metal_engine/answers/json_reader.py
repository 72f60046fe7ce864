"""Parser of a JSON object that arrives in pieces: finds its end, and detects invalid text."""

from __future__ import annotations

import re

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r"""(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+""")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_NUMBER_BEGUN = re.compile(r"-?(0|[1-9]\d*)?((?<=\d)\.\d*)?((?<=\d)[eE][-+]?\d*)?", re.ASCII)
_THREE_DIGITS = re.compile(r"\d{3}\Z")
_LITERALS = ("true", "false", "null")
_ESCAPE_BEGUN = re.compile(r"""\\(["\\/bfnrt]|u[0-9a-fA-F]{0,4})?""")


class JSONObjectReader:
    """Parser of one JSON object. Its time is linear in the number of characters.

    Attributes:
        done: True if the object is complete.
        bad: True if the text is not a JSON object. Parsing stops before the first invalid character.
    """

    def __init__(self) -> None:
        self.done = False
        self.bad = False
        self._open: list[str] = []  # expected closing brackets
        self._expects = "object"
        self._begun = ""  # current incomplete scalar or escape; a number has at most two digits of each run of digits

    def add(self, text: str) -> int:
        """Parse the next piece of text. Return the number of its characters that belong to the object.

        The number is smaller than the length of ``text`` if the object ends, or becomes invalid, within the piece.
        """
        at = 0
        while at < len(text) and not (self.done or self.bad):
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        """Parse one JSON token. Return the position after it. Sets ``bad`` if the text is invalid."""
        if self._expects in ("string", "key string"):
            return self._string(text, at)
        if self._expects == "scalar":
            return self._in_scalar(text, at)
        space = _SPACE.match(text, at)
        assert space is not None
        at = space.end()
        if at == len(text):
            return at
        if self._take(text[at]):
            return at if self._expects == "scalar" else at + 1
        self.bad = True
        return at

    def _take(self, ch: str) -> bool:
        """Parse a character outside of strings, numbers and literals. Return False if it is invalid."""
        expects = self._expects
        if ch in "]}" and self._open and ch == self._open[-1]:
            if expects not in ("comma", "first key", "first value"):
                return False
            self._open.pop()
            self._after_value()
            return True
        if expects == "comma" and ch == ",":
            self._expects = "key" if self._open[-1] == "}" else "value"
        elif expects in ("key", "first key") and ch == '"':
            self._expects = "key string"
        elif expects == "colon" and ch == ":":
            self._expects = "value"
        elif expects in ("value", "first value", "object") and ch == "{":
            self._open.append("}")
            self._expects = "first key"
        elif expects in ("value", "first value") and ch == "[":
            self._open.append("]")
            self._expects = "first value"
        elif expects in ("value", "first value") and ch == '"':
            self._expects = "string"
        elif expects in ("value", "first value") and _SCALAR.fullmatch(ch):
            self._expects, self._begun = "scalar", ""
        else:
            return False
        return True

    def _after_value(self) -> None:
        self.done = not self._open
        self._expects = "comma"

    def _string(self, text: str, at: int) -> int:
        if self._begun:
            escape = _ESCAPE_BEGUN.match(self._begun + text[at : at + 5])
            assert escape is not None
            taken = escape.end() - len(self._begun)
            self.bad = not taken
            is_whole = escape.end() == (6 if escape[0].startswith("\\u") else 2)
            self._begun = "" if is_whole else escape[0]
            return at + taken
        plain = _STRING.match(text, at)
        assert plain is not None
        at = plain.end()
        if at == len(text):
            return at
        if text[at] == '"':
            if self._expects == "string":
                self._after_value()
            else:
                self._expects = "colon"
        elif text[at] == "\\":
            self._begun = "\\"
        else:
            self.bad = True  # a control character is not allowed
            return at
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        more = _SCALAR.match(text, at)
        assert more is not None
        for ch in more[0]:
            longer = self._begun + ch
            if not (_NUMBER_BEGUN.fullmatch(longer) or any(word.startswith(longer) for word in _LITERALS)):
                self.bad = True
                return at
            if not _THREE_DIGITS.search(longer):
                self._begun = longer
            at += 1
        if at < len(text):
            if not (self._begun in _LITERALS or _NUMBER.fullmatch(self._begun)):
                self.bad = True
                return at
            self._begun = ""
            self._after_value()
        return at
