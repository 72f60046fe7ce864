"""Finds the mark that ends a tool call: not every mark in the text is one, because a string may contain marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from metal_engine.answers.call_syntaxes.syntax import Quotes

_SPACE = re.compile(r"\s*")


class CallEnd:
    """Search for the end of one call, whose text arrives in pieces. Takes linear time.

    If a quoted part of the text turns out to have no end, the first mark ends the call.

    Args:
        quotes: parts of the text in which marks are text.
        marks: marks that end the call.

    Attributes:
        first_mark: position and text of the first mark within a quoted part; None if there is none.
    """

    def __init__(self, quotes: Quotes, marks: Sequence[str]) -> None:
        self.first_mark: tuple[int, str] | None = None
        self._quotes = quotes
        self._is_plain = not quotes.pairs
        mark = "|".join(map(re.escape, marks))
        opening = "|".join(map(re.escape, quotes.pairs)) or r"(?!)"
        self._mark = re.compile(mark)
        self._outside = re.compile(f"(?P<mark>{mark})|(?P<opening>{opening})")
        self._inside = {
            text: re.compile(f"(?P<end>{end})|(?P<broken>{quotes.broken or '(?!)'})|(?P<mark>{mark})", re.DOTALL)
            for text, end in quotes.pairs.items()
        }
        self._longest = max(map(len, (*marks, *quotes.pairs, *quotes.pairs.values())))
        self._part = ""  # text that began the current quoted part
        self._is_after = False  # True directly after a quoted part
        self._at = 0

    def find(self, text: str) -> tuple[int, str] | None:
        """Return position and text of the mark that ends the call; None if it has not arrived yet.

        Args:
            text: text of the call so far.
        """
        while True:
            if self._is_after and not self._follows(text):
                return None
            if self._is_plain and self.first_mark is not None:
                return self.first_mark
            if not self._part and not self._is_plain:
                self.first_mark = None
            pattern = self._inside[self._part] if self._part else self._outside
            if self._is_plain:
                pattern = self._mark
            found = pattern.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - self._longest + 1)
                return None
            if self._is_plain:
                return found.start(), found[0]
            kind, self._at = found.lastgroup, found.end()
            if not self._part:
                if kind == "mark":
                    return found.start(), found[0]
                self._part = found[0]
            elif kind == "mark":
                self.first_mark = self.first_mark or (found.start(), found[0])
            elif kind == "broken":
                self._is_plain = True
            elif not found[0].startswith("\\"):
                self._part, self._is_after = "", bool(self._quotes.after)

    def _follows(self, text: str) -> bool:
        """Check the text after a quoted part. Return False if it has not arrived yet."""
        space = _SPACE.match(text, self._at)
        assert space is not None
        at = space.end()
        if at == len(text):
            return False
        self._is_after = False
        self._is_plain = text[at] not in self._quotes.after
        return True

    def forget(self, length: int) -> None:
        """Record that the first ``length`` characters of the text are removed."""
        self._at -= length
        if self.first_mark is not None:
            at, mark = self.first_mark
            self.first_mark = (at - length, mark) if at >= length else None
