"""Splits outputs whose grammar begins after the reasoning: structured outputs and forced tool calls."""

from __future__ import annotations

from typing import Literal

from metal_engine.answers.answer_format import ReasoningMarks
from metal_engine.answers.deltas import AnswerDelta, TextDelta
from metal_engine.answers.splitter import Splitter, overlap


class ReasoningThenContentSplitter(Splitter):
    """Splits an output that may begin with reasoning. All text after the reasoning is content, marks included.

    White space next to the marks is dropped.

    Args:
        marks: marks of reasoning.
        in_reasoning: True if the prompt ends within reasoning.
    """

    def __init__(self, marks: ReasoningMarks, *, in_reasoning: bool) -> None:
        self.reasoning_bounds: list[int] = [0] if in_reasoning else []
        self._marks = marks
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if in_reasoning else "start"
        self._after_mark = in_reasoning
        self._text = ""  # text received but not returned yet
        self._num_received = 0  # number of characters received

    def add(self, text: str) -> list[AnswerDelta]:
        self._text += text
        self._num_received += len(text)
        deltas: list[AnswerDelta] = []
        if self._state == "start":
            self._find_start()
        if self._state == "reasoning":
            deltas += self._take_reasoning()
        if self._state == "content":
            deltas += self._take_all("content")
        return deltas

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        return self._take_all("reasoning" if self._state == "reasoning" else "content")

    def _find_start(self) -> None:
        """Leave the state ``start`` once the text begins with the opening mark, or cannot begin with it any more."""
        begun = self._text.lstrip()
        if begun.startswith(self._marks.start):
            self._cross("reasoning", begun[len(self._marks.start) :])
        elif not self._marks.start.startswith(begun):
            self._state = "content"

    def _take_reasoning(self) -> list[AnswerDelta]:
        """Return the reasoning received since the last call. Change the state to ``content`` after the closing mark.

        Without a closing mark, keep a suffix that may begin the mark, and the white space before that suffix.
        """
        at = self._text.find(self._marks.end)
        if at >= 0:
            rest = self._text[at + len(self._marks.end) :]
            self._text = self._text[:at].rstrip()
            deltas = self._take_all("reasoning")
            self._cross("content", rest)
            return deltas
        end = len(self._text[: len(self._text) - overlap(self._text, self._marks.end)].rstrip())
        held, self._text = self._text[end:], self._text[:end]
        deltas = self._take_all("reasoning")
        self._text += held
        return deltas

    def _cross(self, state: Literal["reasoning", "content"], rest: str) -> None:
        """Change the state at a mark that ends before ``rest``."""
        self._state, self._text, self._after_mark = state, rest, True
        self.reasoning_bounds.append(self._num_received - len(rest))

    def _take_all(self, kind: Literal["reasoning", "content"]) -> list[AnswerDelta]:
        """Return the text as one delta, without white space after a mark."""
        if self._after_mark:
            self._text = self._text.lstrip()
        if not self._text:
            return []
        text, self._text, self._after_mark = self._text, "", False
        return [TextDelta(kind, text)]


class CallsOrStructureSplitter(Splitter):
    """Splits content that is either tool calls or a structured output. Marks in the structured output are text.

    Args:
        mark: mark at the beginning of tool calls.
        calls: splitter of the calls.
    """

    def __init__(self, mark: str, calls: Splitter) -> None:
        self._mark = mark
        self._calls = calls
        self._chosen: Splitter | None = None  # None while more text decides it
        self._begun = ""

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def is_in_value(self) -> bool:
        return self._calls.is_in_value

    def add(self, text: str) -> list[AnswerDelta]:
        if self._chosen is not None:
            return self._chosen.add(text)
        self._begun = (self._begun + text).lstrip()
        if self._begun != self._mark and self._mark.startswith(self._begun):
            return []
        self._chosen = self._calls if self._begun.startswith(self._mark) else Splitter()
        return self._chosen.add(self._begun)

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        if self._chosen is None:
            return super().add(self._begun)
        return self._chosen.finish(truncated=truncated)


class HandoverSplitter(Splitter):
    """Splits an output with two splitters in sequence: ``rest`` splits the text that ``first`` returns as content.

    Args:
        first: splitter that separates the reasoning.
        rest: splitter of the text after the reasoning.
    """

    def __init__(self, first: Splitter, rest: Splitter) -> None:
        self.reasoning_bounds = first.reasoning_bounds
        self._first = first
        self._rest = rest

    @property
    def num_calls(self) -> int:
        return self._rest.num_calls

    @property
    def is_in_value(self) -> bool:
        return self._rest.is_in_value

    def add(self, text: str) -> list[AnswerDelta]:
        return self._handed_over(self._first.add(text))

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        deltas = self._handed_over(self._first.finish(truncated=truncated))
        return deltas + self._rest.finish(truncated=truncated)

    def _handed_over(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        result: list[AnswerDelta] = []
        for delta in deltas:
            is_content = isinstance(delta, TextDelta) and delta.kind == "content"
            result += self._rest.add(delta.text) if is_content else [delta]  # type: ignore[union-attr]
        return result
