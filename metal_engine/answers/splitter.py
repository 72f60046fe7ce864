"""Splitters take an answer's text apart and lose nothing: what looks like a tool call and is not one is content."""

from __future__ import annotations

from collections.abc import Sequence

from metal_engine.answers.deltas import AnswerDelta, TextDelta


class Splitter:
    """Takes one answer's text, cut anywhere, into deltas. Where it was cut makes no difference to their sum.

    This one takes everything for content; others extend it.

    Attributes:
        num_calls: tool calls so far; a call counts once it has proved to be one.
        reasoning_bounds: where reasoning begins and where it ends, in turn, in characters of the text so far.
            Reasoning begins behind its first mark and ends behind its second one. The list grows with the text.
    """

    num_calls: int = 0
    reasoning_bounds: Sequence[int] = ()

    def add(self, text: str) -> list[AnswerDelta]:
        """Takes more text; returns what can be told of it."""
        return [TextDelta("content", text)] if text else []

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        """Returns what was held back; no more text comes.

        Args:
            truncated: whether the answer was cut off before the model had come to its end.
        """
        return []


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` with which ``mark`` begins, short of the whole mark."""
    if mark[0] not in text[-len(mark) :]:
        return 0
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
