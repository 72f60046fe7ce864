"""What takes an answer's text apart. Nothing is lost: text that looks like a tool call and is not one is content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from metal_engine.answers.deltas import AnswerDelta, TextDelta


class Splitter(Protocol):
    """Takes one answer's text, cut anywhere, into deltas. Where it was cut makes no difference to their sum.

    Attributes:
        num_calls: tool calls so far; a call counts once it has proved to be one.
        reasoning_bounds: where reasoning begins and where it ends, in turn, in characters of the text so far.
            Reasoning begins behind its first mark and ends behind its second one. The list grows with the text.
    """

    @property
    def num_calls(self) -> int: ...

    @property
    def reasoning_bounds(self) -> Sequence[int]: ...

    def add(self, text: str) -> list[AnswerDelta]:
        """Takes more text; returns what can be told of it."""
        ...

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        """Returns what was held back; no more text comes.

        Args:
            truncated: whether the answer was cut off before the model had come to its end.
        """
        ...


class PlainSplitter:
    """Everything is content."""

    num_calls = 0
    reasoning_bounds = ()

    def add(self, text: str) -> list[AnswerDelta]:
        return [TextDelta("content", text)] if text else []

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        return []


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` with which ``mark`` begins, short of the whole mark."""
    if mark[0] not in text[-len(mark) :]:
        return 0
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
