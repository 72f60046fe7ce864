"""Finds the mark that ends a tool call. A string in the call may contain the same mark as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from metal_engine.answers.call_syntaxes.syntax import Quotes

_SPACE = re.compile(r"\s*")
# Values of the attribute in an opening tag that declares a string: ``type="string"`` of Kimi K3, ``string="true"`` of
# DeepSeek.
_STRING_TYPES = ("string", "true")


class CallEnd:
    """Search for the end of one call, whose text arrives in pieces. Takes linear time.

    A quoted part is a part of the call in which marks are text, such as a string. If a quoted part turns out to have no
    end, the first mark in it or after it ends the call.

    Args:
        quotes: forms of the quoted parts.
        marks: marks that end the call.
    """

    def __init__(self, quotes: Quotes, marks: Sequence[str]) -> None:
        self._first_mark: tuple[int, str] | None = None  # position and text of the first mark within the quoted part
        self._quotes = quotes
        # ``outside``: not in a quoted part. ``head``: in a quoted part, before its value. ``text``: in a quoted part.
        # ``json`` and ``string``: in a quoted part that is a JSON value, outside and inside of its strings. ``after``:
        # directly after a quoted part. ``plain``: every mark ends the call. A call enters the state ``plain`` if the
        # format has no quoted parts, or if a quoted part has no end.
        self._state: Literal["plain", "outside", "after", "head", "text", "json", "string"] = "outside"
        if not quotes.pairs:
            self._state = "plain"
        self._end = ""  # regular expression for the end of the current quoted part
        self._mark = f"(?P<mark>{'|'.join(map(re.escape, marks))})"
        self._longest = max(map(len, (*marks, *quotes.pairs, *quotes.pairs.values())))
        self._at = 0
        self._opened = 0  # position of the current quoted part

    def find(self, text: str) -> tuple[int, str] | None:
        """Return position and text of the mark that ends the call; None if that mark has not arrived yet.

        Args:
            text: text of the tool call so far, after the opening mark. Later texts must begin with earlier texts.
        """
        while True:
            if self._state == "plain" and self._first_mark is not None:
                return self._first_mark
            if self._state in ("after", "head"):
                if not (self._pass_space(text) if self._state == "after" else self._pass_head(text)):
                    return None
                continue
            found = self._pattern().search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - self._longest + 1)
                return None
            kind, self._at = found.lastgroup, found.end()
            if kind == "mark" and self._state in ("plain", "outside"):
                return found.start(), found[0]
            if kind == "mark":
                self._first_mark = self._first_mark or (found.start(), found[0])
            elif kind == "opening":
                self._end, self._opened = self._quotes.pairs[found[0]], found.start()
                self._state = "text" if self._quotes.value is None else "head"
            elif kind == "end" and not found[0].startswith("\\"):  # not an escape
                self._state = "after" if self._quotes.after else "outside"
            elif kind == "broken":
                self._state = "plain"
            elif kind == "quote":
                self._state = "string" if self._state == "json" else "json"

    @property
    def is_quoting(self) -> bool:
        """True if the text so far ends within a quoted part."""
        return self._state in ("head", "text", "json", "string")

    def unclosed_mark(self) -> tuple[int, str] | None:
        """Return position and text of the first mark in the quoted part that is open at the end of the text.

        Return None if no quoted part is open, or if the open part contains no mark.
        """
        return None if self._state == "after" else self._first_mark

    def forget(self, length: int) -> None:
        """Record that the first ``length`` characters of the text are removed."""
        self._at -= length
        self._opened -= length
        if self._first_mark is not None:
            at, mark = self._first_mark
            self._first_mark = (at - length, mark) if at >= length else None

    def _pattern(self) -> re.Pattern[str]:
        """Return a pattern for the next mark, quote or escape at which the current state can change."""
        opening = "|".join(map(re.escape, self._quotes.pairs))
        broken = self._quotes.broken or "(?!)"
        patterns = {
            "plain": self._mark,
            "outside": f"{self._mark}|(?P<opening>{opening})",
            "text": f"(?P<end>{self._end})|(?P<broken>{broken})|{self._mark}",
            "json": f'(?P<quote>")|(?P<end>{self._end})|{self._mark}',
            "string": rf'(?P<escape>\\.)|(?P<quote>")|(?P<broken>[\x00-\x1f])|{self._mark}',
        }
        return re.compile(patterns[self._state], re.DOTALL)  # `re` caches compiled patterns

    def _pass_space(self, text: str) -> bool:
        """Leave the state ``after`` at the next character other than white space. Return False if there is none yet."""
        at = _end_of_space(text, self._at)
        if at == len(text):
            return False
        if text[at] in self._quotes.after:
            self._state, self._first_mark = "outside", None
        else:
            self._state = "plain"
        return True

    def _pass_head(self, text: str) -> bool:
        """Leave the state ``head`` at the start of the part's value. Return False if the start has not arrived yet."""
        assert self._quotes.value is not None
        head = self._quotes.value.match(text, self._opened)
        if head is None:
            ending = re.compile(f"{self._end}|{self._quotes.broken or '(?!)'}|{self._mark}")
            if ending.search(text, self._at) is None:
                self._at = max(self._at, len(text) - self._longest + 1)
                return False
            self._state = "text"
            return True
        first = _end_of_space(text, head.end())
        if first == len(text):
            return False
        is_string = head.groupdict().get("type") in _STRING_TYPES
        is_json = text[first] in "{[" and not is_string and self._quotes.is_json(head["name"])
        self._at, self._state = head.end(), "json" if is_json else "text"
        return True


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
