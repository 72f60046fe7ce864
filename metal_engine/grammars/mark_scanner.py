"""Finds the marks that divide an output into phases, in the bytes of its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from metal_engine.grammars.compiler import GrammarTask

FreePhase = Literal["content", "reasoning"]

# Number of bytes of a mark's tail (`Segment.tail`) that the text must have before the segment may begin. For a tail of
# at most this length, the number is the length minus 1, at least 1.
_PARTIAL_BYTES = 4


@dataclass(frozen=True, eq=False)
class Segment:
    """Constrained part of an output that begins at a mark.

    Attributes:
        grammar: grammar of the segment. It begins with ``tail``.
        tail: bytes of the mark after its last special token; empty if the mark ends with a special token.
        is_call: True for a tool call; False for a structured output, which lasts until the end of the output.
        is_whole: True for a tool call that is the whole content.
        openings: texts that begin reasoning. If the segment's text begins with one of them, after white space, the text
            is reasoning, and the segment ends.
    """

    grammar: GrammarTask
    tail: bytes
    is_call: bool
    is_whole: bool = False
    openings: tuple[bytes, ...] = ()


@dataclass(frozen=True, eq=False)
class Mark:
    """Mark in free text. ``target`` is the free phase or the segment that begins after the mark."""

    text: bytes
    target: FreePhase | Segment

    @property
    def is_whole(self) -> bool:
        """True for the mark of a call that is the whole content."""
        return isinstance(self.target, Segment) and self.target.is_whole


@dataclass(frozen=True)
class Entry:
    """Result of :meth:`MarkScanner.add` at the beginning of a segment.

    Attributes:
        mark: mark that begins the segment.
        token_ids: tokens so far that the segment's grammar has to consume, beginning with the mark's tail.
        is_partial: True if the mark is still incomplete. Later text may differ from the mark.
        rest: bytes of the last token after the mark.
    """

    mark: Mark
    token_ids: list[int]
    is_partial: bool
    rest: bytes = b""


class PlainTokens:
    """Set of the tokens that do not contain the first byte of any mark. No mark can begin in these tokens.

    Shared by all outputs whose marks have the same first bytes.

    Args:
        first_bytes: first bytes of the marks.
        token_bytes: returns the UTF-8 bytes of a token.

    Attributes:
        known: plain tokens found so far.
        first_byte: pattern for the first byte of a mark.
    """

    def __init__(self, first_bytes: frozenset[bytes], token_bytes: Callable[[int], bytes]) -> None:
        self.known: set[int] = set()
        self.first_byte = re.compile(b"|".join(map(re.escape, sorted(first_bytes))) or b"(?!)")
        self._token_bytes = token_bytes

    def __contains__(self, token_id: int) -> bool:
        if token_id in self.known:
            return True
        is_plain = self.first_byte.search(self._token_bytes(token_id)) is None
        if is_plain:
            self.known.add(token_id)
        return is_plain


@dataclass(eq=False, slots=True)
class MarkScanner:
    """Search for marks in the free text of one output, a token at a time.

    Args:
        marks: marks that end each phase.
        plain: tokens without the first byte of any mark, for each phase.
        token_bytes: returns the UTF-8 bytes of a token.
        phase: current phase. It changes at a mark whose target is a phase.
        first_marks: marks that count only at the beginning of the content, after white space or reasoning. Empty once
            the output has other content.

    Attributes:
        num_reasoning_tokens: number of tokens of reasoning so far.
    """

    marks: Mapping[FreePhase, Sequence[Mark]]
    plain: Mapping[FreePhase, PlainTokens]
    token_bytes: Callable[[int], bytes]
    phase: FreePhase
    first_marks: Sequence[Mark] = ()
    num_reasoning_tokens: int = 0
    _longest: int = field(init=False)  # length of the longest mark
    _text: bytes = b""  # bytes at the end of the output that may belong to a mark
    _end: int = 0  # position after `_text`, in the bytes of the tokens that were searched for marks
    _tokens: list[tuple[int, int]] = field(default_factory=list)  # end and id of each token whose bytes are in `_text`

    def __post_init__(self) -> None:
        every = [mark for marks in (*self.marks.values(), self.first_marks) for mark in marks]
        self._longest = max((len(mark.text) for mark in every), default=1)

    def copy(self) -> MarkScanner:
        other = copy(self)
        other._tokens = list(self._tokens)
        return other

    def add(self, token_id: int) -> Entry | None:
        """Process the next token of free text. Return an entry if a segment begins or may begin; otherwise None.

        A segment begins if the token completes a mark. A segment may begin if the text up to this token ends with a
        large enough part of a mark.
        """
        if not self._text and token_id in self.plain[self.phase]:  # most tokens
            self.num_reasoning_tokens += self.phase == "reasoning"
            if self.first_marks:
                self._text = self.token_bytes(token_id)
                self._drop(len(self._text))
            return None
        piece = self.token_bytes(token_id)
        self._text += piece
        self._end += len(piece)
        self._tokens.append((self._end, token_id))
        if self.phase == "reasoning":
            self.num_reasoning_tokens += 1
        while (found := self._first_mark()) is not None:
            at, mark = found
            end = at + len(mark.text)
            if isinstance(mark.target, Segment):
                token_ids = self._tokens_from(end - len(mark.target.tail))
                entry = Entry(mark, token_ids, is_partial=False, rest=self._text[end:])
                self.enter(self.phase)
                self.first_marks = ()
                return entry
            self._drop(at)
            self._text = self._text[end - at :]
            self.phase = mark.target
            self.num_reasoning_tokens += mark.target == "reasoning"
        self._trim()
        return self._partial_entry() if self._text else None

    @property
    def known_plain_tokens(self) -> Set[int]:
        """Known tokens that cannot begin another phase.

        Empty while earlier text may become a mark, or while one of ``first_marks`` may follow.
        """
        is_at_beginning = self.first_marks and self.phase == "content"
        return frozenset() if self._text or is_at_beginning else self.plain[self.phase].known

    def enter(self, phase: FreePhase, text: bytes = b"") -> None:
        """Begin a phase, and drop earlier text. ``text`` is the part of the last token that belongs to the phase."""
        self.phase = phase
        self._text = text
        self._tokens = self._tokens[-1:] if text else []

    def _first_mark(self) -> tuple[int, Mark] | None:
        """Return the position of the first mark in the text, and the mark; None if there is none.

        If several marks begin at this position, the first of them in the list wins.
        """
        found = None
        for mark in self._possible_marks():
            at = self._text.find(mark.text)
            if at >= 0 and (found is None or at < found[0]) and self._may_begin(mark, at):
                found = at, mark
        return found

    def _possible_marks(self) -> Sequence[Mark]:
        marks = self.marks[self.phase]
        return [*marks, *self.first_marks] if self.first_marks and self.phase == "content" else marks

    def _may_begin(self, mark: Mark, at: int) -> bool:
        """Return True if the text before position ``at`` allows a mark there."""
        return not mark.is_whole or not self._text[:at].strip()

    def _tokens_from(self, start: int) -> list[int]:
        """Return the tokens with bytes at or after position ``start`` of the text."""
        begin = self._end - len(self._text) + start
        return [token_id for end, token_id in self._tokens if end > begin]

    def _trim(self) -> None:
        """Drop the beginning of the text, which can belong to no mark any more."""
        first = self.plain[self.phase].first_byte.search(self._text, max(len(self._text) - self._longest + 1, 0))
        self._drop(len(self._text) if first is None else first.start())
        begin = self._end - len(self._text)
        if self._tokens and self._tokens[0][0] <= begin:
            self._tokens = [(end, token_id) for end, token_id in self._tokens if end > begin]

    def _drop(self, length: int) -> None:
        """Drop the first bytes of the text, which belong to the current phase."""
        if self.first_marks and self.phase == "content" and self._text[:length].strip():
            self.first_marks = ()
        self._text = self._text[length:]

    def _partial_entry(self) -> Entry | None:
        """Return the entry into a segment if the text ends with an incomplete mark; otherwise None.

        The text must have all special tokens of the mark, and at least one byte of the mark's ``tail``. The segment's
        grammar begins with ``tail``, so it can compute masks while the mark is incomplete.
        """
        for mark in self._possible_marks():
            segment = mark.target
            if not isinstance(segment, Segment) or not segment.tail:
                continue
            head = len(mark.text) - len(segment.tail)
            least = head + min(_PARTIAL_BYTES, len(segment.tail) - 1)
            beginning = mark.text[: max(least, head + 1)]
            at = self._text.find(beginning)
            while at >= 0:
                if mark.text.startswith(self._text[at:]) and self._may_begin(mark, at):
                    return Entry(mark, self._tokens_from(at + head), is_partial=True)
                at = self._text.find(beginning, at + 1)
        return None
