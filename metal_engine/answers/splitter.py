"""Base class of splitters, which split an output's text without loss: text that is not a valid tool call is content."""

from __future__ import annotations

from collections.abc import Sequence

from metal_engine.answers.deltas import AnswerDelta, TextDelta


class Splitter:
    """Splits the text of one output into deltas. The concatenated deltas do not depend on where the text is cut.

    This base class returns all text as content. Subclasses parse reasoning and tool calls.

    Attributes:
        reasoning_bounds: positions at which reasoning begins and ends, alternating, e.g. ``[7, 90]``, in characters of
            the output. Reasoning begins after its opening mark and ends after its closing mark. The list grows with the
            output.
    """

    reasoning_bounds: Sequence[int] = ()

    @property
    def num_calls(self) -> int:
        """Number of tool calls parsed successfully so far."""
        return 0

    @property
    def is_in_value(self) -> bool:
        """True if the text so far ends within an argument of a tool call."""
        return False

    def add(self, text: str) -> list[AnswerDelta]:
        """Parse the next piece of text. Return the deltas that later text cannot change."""
        return [TextDelta("content", text)] if text else []

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        """Return the deltas of the text held back. Call it after the last piece of text.

        Args:
            truncated: True if the output was cut off before the model ended it.
        """
        return []


class ContentGaps:
    """White space at marks between two parts of the content. It separates the parts, so that words are not joined."""

    def __init__(self) -> None:
        self._gap = ""
        self._has_content = False

    def add(self, space: str) -> None:
        """Record white space at a mark. The first white space since the last content is used."""
        self._gap = self._gap or space

    def before(self, text: str) -> str:
        """Return ``text``, the next content, after the recorded white space. Clear the record.

        Adds no white space before the first content, or if ``text`` itself begins with white space.
        """
        gap, self._gap = self._gap, ""
        if not self._has_content or text[:1].isspace():
            gap = ""
        self._has_content = True
        return gap + text


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    if mark[0] not in text[-len(mark) :]:
        return 0
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
