"""Finds stop strings in the text of outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from metal_engine.output_phases import CallEndSearch, ReasoningPhase


@dataclass(eq=False, slots=True)
class StopPrefix:
    """Prefix of one or more stop strings: a node of an Aho-Corasick automaton, whose root is the empty prefix.

    Attributes:
        depth: length of the prefix.
        longer: prefixes that are one character longer, keyed by their last character.
        shorter: longest proper suffix of this prefix that is also a prefix of a stop string; None for the root.
        stop: longest stop string that this prefix ends with; None if there is none.
    """

    depth: int
    longer: dict[str, StopPrefix] = field(default_factory=dict)
    shorter: StopPrefix | None = None
    stop: str | None = None

    def after(self, ch: str) -> StopPrefix:
        """Return the node for a text that ended with this prefix and now has one more character, ``ch``.

        The node is the longest prefix of a stop string with which the longer text ends.
        """
        node = self
        while ch not in node.longer:
            if node.shorter is None:
                return node
            node = node.shorter
        return node.longer[ch]


@lru_cache(maxsize=4)
def stop_automaton(stops: tuple[str, ...]) -> StopPrefix:
    """Return the root of the automaton of some stop strings, at least one.

    Time and memory are linear in the characters of the stop strings: 20 ms and 5 MiB for the maximum of 16,384.
    """
    root = StopPrefix(0)
    for stop in stops:
        node = root
        for ch in stop:
            node = node.longer.setdefault(ch, StopPrefix(node.depth + 1))
        node.stop = stop
    nodes = list(root.longer.values())
    for node in nodes:
        node.shorter = root
    for node in nodes:  # shorter prefixes first: the loop appends the longer prefixes
        for ch, longer in node.longer.items():
            assert node.shorter is not None
            longer.shorter = node.shorter.after(ch)
            longer.stop = longer.stop or longer.shorter.stop
            nodes.append(longer)
    return root


class StopStrings:
    """Finds stop strings in text that arrives in pieces. Holds back text that may be the start of a stop string.

    Each character costs constant time, regardless of the number and length of the stop strings.

    Args:
        root: automaton of the stop strings.
        include: True if the text shown includes the stop string.
    """

    def __init__(self, root: StopPrefix, *, include: bool = False) -> None:
        self._root = self._node = root
        self._include = include
        self._held = ""

    def add(self, text: str, *, is_active: bool = True) -> tuple[str, str | None]:
        """Append new text. Return the text that may be shown, and the stop string if one is complete.

        The stop string that is complete first wins. Among stop strings that end at the same character, the longest
        wins. The result therefore does not depend on the pieces of the text. The text shown ends before the stop
        string, unless ``include`` is set.

        Args:
            is_active: False to ignore the stop strings that end in the new text.
        """
        node = self._node
        if not node.depth and node.longer.keys().isdisjoint(text):  # fast path: no stop string starts in this text
            return text, None
        for i, ch in enumerate(text):
            node = node.after(ch)
            if is_active and node.stop is not None:
                shown = self._held + text[: i + 1]
                self._held = ""
                return shown if self._include else shown[: -len(node.stop)], node.stop
        self._node = node
        text = self._held + text
        end = len(text) - node.depth
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> str:
        """Return the text that was held back. Call it after the last piece of text."""
        held, self._held = self._held, ""
        self._node = self._root
        return held


class StopStringsOutsideReasoning(StopStrings):
    """Finds stop strings in text with reasoning between marks. Within the reasoning, stop strings have no effect.

    White space after the reasoning counts as reasoning, because the parsed content begins without it. Marks in tool
    calls and in a structured output are text.

    Args:
        root: automaton of the stop strings.
        reasoning: marks of the reasoning.
        is_structured: True if a structured output follows the reasoning.
        include: True if the text shown includes the stop string.
    """

    def __init__(
        self, root: StopPrefix, reasoning: ReasoningPhase, *, is_structured: bool = False, include: bool = False
    ) -> None:
        super().__init__(root, include=include)
        self._start = reasoning.start
        self._calls = reasoning.calls
        calls = dict.fromkeys(reasoning.calls.starts if reasoning.calls is not None else (), "call")
        # Marks that begin a call as the first text of the content. Empty once there is content or a call.
        self._first_starts = reasoning.calls.first_starts if reasoning.calls is not None else ()
        # State -> marks that end it, each with the next state. ``begun``: the text may begin with reasoning.
        self._marks: dict[str, dict[str, str]] = {
            "begun": {reasoning.start: "reasoning"},
            "content": {reasoning.start: "reasoning", **calls},
            "reasoning": {reasoning.end: "structure" if is_structured else "content"},
            "structure": {},
        }
        self._state = "reasoning" if reasoning.begins_inside else "begun" if is_structured else "content"
        if reasoning.content_start:
            self._state, self._marks["reasoning"] = "reasoning", {reasoning.content_start: "structure"}
        every = [mark for marks in (*self._marks.values(), self._first_starts) for mark in marks]
        self._longest = max(map(len, every))
        self._is_after_reasoning = False  # True between the end of the reasoning and the next text
        self._tail = ""  # end of the text so far, which may be the beginning of a mark
        self._call = ""  # text of the current call so far
        self._call_end: CallEndSearch | None = None  # search for the end of the current call

    def add(self, text: str, *, is_active: bool = True) -> tuple[str, str | None]:
        shown = ""
        while text:
            if self._state == "call":
                end = self._end_of_call(text)
                more, found = super().add(text[:end], is_active=is_active)
                shown, text = shown + more, text[end:]
                if found is not None:
                    return shown, found
                continue
            window = self._tail + text
            if self._state == "begun" and not self._may_begin(window.lstrip()):
                self._state = "structure"
            marks = self._possible_marks(window)
            at, mark = min(((window.find(mark), mark) for mark in marks if mark in window), default=(-1, ""))
            end = len(text) if at < 0 else max(at + len(mark) - len(self._tail), 0)
            part, text = text[:end], text[end:]
            if self._is_after_reasoning:
                begun = part.lstrip()
                shown += part[: len(part) - len(begun)]
                part, self._is_after_reasoning = begun, not begun
            is_searched = self._state != "reasoning"
            more, found = super().add(part, is_active=is_active) if is_searched else (part, None)
            shown += more
            if found is not None:
                return shown, found
            if at >= 0:
                self._is_after_reasoning = self._state == "reasoning"
                self._state, self._tail = marks[mark], ""
                shown += self.flush() if self._state == "reasoning" else ""
                if self._state == "call" and self._calls is not None:
                    self._first_starts = ()
                    self._call, self._call_end = "", self._calls.end() if self._calls.end is not None else None
            else:
                self._tail = window[max(len(window) - self._longest + 1, 0) :]
        return shown, None

    def _end_of_call(self, text: str) -> int:
        """Return the length of the part of ``text`` that belongs to the current call.

        If the call ends in ``text``, or has ended in earlier text, change the state to ``content``.
        """
        if self._call_end is None:
            return len(text)
        num_before = len(self._call)
        self._call += text
        found = self._call_end.find(self._call)
        if found is None:
            return len(text)
        end = found[0] + len(found[1])
        # The end may be found late. Text after it that was searched for stop strings is not searched again.
        self._state, self._tail = "content", self._call[end:num_before]
        return max(end - num_before, 0)

    def _possible_marks(self, window: str) -> dict[str, str]:
        """Return the marks that can end the current state, each with the next state.

        Args:
            window: suffix of the text since the last mark: all characters that may belong to the next mark.
        """
        marks = self._marks[self._state]
        if self._state != "content" or not self._first_starts:
            return marks
        begun = window.lstrip()
        first = next((start for start in self._first_starts if begun.startswith(start)), None)
        if first is not None:
            return {**marks, first: "call"}
        if not any(one.startswith(begun[: len(one)]) for one in (*marks, *self._first_starts)):
            self._first_starts = ()
        return marks

    def _may_begin(self, text: str) -> bool:
        """Return True if a text begins with reasoning, or may do so when more text arrives."""
        return text.startswith(self._start) or self._start.startswith(text)
