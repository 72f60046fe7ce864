"""Splits text that has reasoning and tool calls between marks, the format of most models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from metal_engine.answers.answer_format import AnswerFormat, BareOpening, ToolParser
from metal_engine.answers.call_end import CallEnd
from metal_engine.answers.call_reader import CallReader
from metal_engine.answers.call_syntaxes.syntax import NO_QUOTES
from metal_engine.answers.call_syntaxes.tool_schemas import tool_schemas
from metal_engine.answers.deltas import AnswerDelta, TextDelta, joined
from metal_engine.answers.splitter import ContentGaps, Splitter, overlap

# Characters after which a stray mark is quoted text, and stays in the content.
_QUOTES = frozenset("`'\"")


class MarkSplitter(Splitter):
    """Splits an output at the marks of reasoning and tool calls.

    White space next to a mark is dropped. If the mark is between two parts of the content, the white space is kept as
    their separator (:class:`metal_engine.answers.splitter.ContentGaps`).

    Calls within reasoning are returned as reasoning. If the model itself ends an output without an end mark of
    reasoning, calls at the end of the output are parsed as calls.

    Args:
        answer_format: output format of the model.
        tools: tools that may be called, in OpenAI's form; empty to leave tool calls in the text.
        in_reasoning: True if the prompt ends within reasoning.
        parallel: True if several calls are allowed. Otherwise, calls after the first one are dropped.
        incremental: True to stream a call's arguments if the format allows it.
        drops_end: True to drop end marks of reasoning from the content, except after a quote character. A model may
            still write its end mark after a budget or the prompt has ended the reasoning.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tools: Sequence[dict[str, Any]] = (),
        *,
        in_reasoning: bool = False,
        parallel: bool = True,
        incremental: bool = False,
        drops_end: bool = False,
    ) -> None:
        self.reasoning_bounds: list[int] = [0] if in_reasoning else []
        self._opening = ""  # opening mark that ends the prompt and that the output may repeat; empty if it cannot
        self._dropped: tuple[str, ...] = ()
        self._stray = ""  # mark that is dropped except after a quote character
        self._last = ""  # last character of the returned content
        self._tool = tool = answer_format.tool if tools else None
        self._calls: CallReader | None = None
        self._bare: _BareOpenings | None = None
        self._calls_at_end: _CallsAtEnd | None = None
        self._gaps = ContentGaps()
        reasoning = answer_format.reasoning
        # Marks that end each state.
        self._marks: dict[str, list[str]] = {"content": [], "reasoning": [], "call": []}
        if reasoning is not None:
            self._opening = reasoning.start if in_reasoning else ""
            self._stray = reasoning.end if drops_end and reasoning.end not in reasoning.dropped else ""
            self._dropped = (*reasoning.dropped, *([self._stray] if self._stray else []))
            self._marks["content"] += [reasoning.start, *self._dropped]
            self._marks["reasoning"].append(reasoning.end)
        if tool is not None:
            head = answer_format.call_head if incremental else None
            self._calls = CallReader(tool, tools, parallel=parallel, head=head, gaps=self._gaps)
            self._marks["content"].append(tool.tool_call_start)
            self._marks["call"].append(tool.tool_call_end or tool.tool_call_start)
            names = [tool["function"]["name"] for tool in tools]
            if answer_format.bare is not None:
                self._bare = _BareOpenings(answer_format.bare, names)
            if reasoning is not None and tool.tool_call_end:
                self._calls_at_end = _CallsAtEnd(tool, names)
        self._quotes = NO_QUOTES if answer_format.syntax is None else answer_format.syntax.quotes(tool_schemas(tools))
        self._call_end = CallEnd(NO_QUOTES, ("",))  # search for the end of the current call
        self._state: Literal["content", "reasoning", "call"] = "reasoning" if in_reasoning else "content"
        self._text = ""  # text received but not returned yet
        self._end = 0  # end of the received text, in characters of the output
        self._after_mark = in_reasoning
        self._before_call = ""  # white space and the opening mark

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_in_value(self) -> bool:
        return self._state == "call" and self._call_end.is_quoting

    def add(self, text: str) -> list[AnswerDelta]:
        return self.take(text, len(text))

    def take(self, text: str, length: int) -> list[AnswerDelta]:
        """Parse the next ``length`` characters of the output, which the caller may have replaced by ``text``.

        ``reasoning_bounds`` counts characters of the original output. Return the resulting deltas.
        """
        searched = len(self._text)
        self._text += text
        self._end += length
        if self._opening:
            begun = self._text.lstrip()
            if self._opening.startswith(begun) and begun != self._opening:
                return []
            self._text = begun.removeprefix(self._opening)
            self._opening, searched = "", 0
        deltas: list[AnswerDelta] = []
        while (found := self._next_mark(searched)) is not None:
            deltas += self._cross_at(*found)
            searched = 0
        if self._state != "call":
            deltas += self._give_out()
        elif self._calls is not None:
            deltas += self._calls.read_more(self._text)
        return joined(deltas)

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        deltas: list[AnswerDelta] = []
        if self._state == "reasoning" and self._calls_at_end is not None and not truncated:
            at = self._calls_at_end.find(self._text)
            if self._calls_at_end.has_ended(self._text[at:]):
                deltas += self._cross_at(at, "")
                calls, self._text = self._text, ""
                deltas += self.take(calls, 0)
        while self._state == "call" and not truncated and (found := self._call_end.unclosed_mark()) is not None:
            # The quoted part around the mark has no end.
            deltas += self._cross_at(*found)
            deltas += self.take("", 0)
        return joined(deltas + self._finish(truncated))

    def _finish(self, truncated: bool) -> list[AnswerDelta]:
        """Return the deltas of the remaining text."""
        rest, self._text = self._text, ""
        if self._state != "call":
            if self._after_mark:
                rest = self._stripped(rest)
            return [self._shown(rest)] if rest else []
        assert self._tool is not None
        # A model that ends its output within a call may have forgotten the closing mark. A truncated call is
        # incomplete.
        complete = not truncated or not self._tool.tool_call_end
        return self._end_call(rest, "", complete=complete, truncated=truncated)

    def _cross_at(self, at: int, mark: str) -> list[AnswerDelta]:
        """Remove the text up to and including the mark at a position, and change the state.

        Return the deltas of the text before the mark.
        """
        before, self._text = self._text[:at], self._text[at + len(mark) :]
        if self._calls_at_end is not None:
            self._calls_at_end.forget()
        deltas = self._cross(before, mark)
        if self._state == "call":
            self._call_end = CallEnd(self._quotes, self._marks["call"])
        return deltas

    def _next_mark(self, searched: int) -> tuple[int, str] | None:
        """Return position and text of the first mark that ends the current state; None if there is none.

        The returned text is empty if a call begins there without its opening mark. The first ``searched`` characters
        contain no whole mark.
        """
        if self._state == "call":
            return self._call_end.find(self._text)
        found = []
        quotable = self._stray if self._state == "content" else None
        for mark in self._marks[self._state]:
            at = self._text.find(mark, max(searched - len(mark) + 1, 0))
            while at >= 0 and mark == quotable and (self._text[at - 1 : at] or self._last) in _QUOTES:
                at = self._text.find(mark, at + 1)
            if at >= 0:
                found.append((at, mark))
        if self._bare is not None and self._state == "content":
            at = self._bare.find(self._text, searched)
            if at >= 0:
                found.append((at, ""))  # the opening is part of the call
        return min(found, default=None)

    def _cross(self, before: str, mark: str) -> list[AnswerDelta]:
        """Change the state at a mark. Return the deltas of the text before the mark."""
        state = self._state
        if state == "call":
            assert self._tool is not None
            if not self._tool.tool_call_end:  # the mark begins the next call
                deltas = self._end_call(before, "")
                self._before_call = mark
                return deltas
            self._state, self._after_mark = "content", True
            return self._end_call(before, mark)
        if self._after_mark:
            before = self._stripped(before)
        shown = before.rstrip()
        if self._bare is not None and state == "content" and shown:
            self._bare.pass_content()
        is_call = self._tool is not None and state == "content" and mark in ("", self._tool.tool_call_start)
        if state == "content" and mark in self._dropped:
            pass
        elif is_call:
            self._state, self._before_call = "call", before[len(shown) :] + mark
        else:
            self._state = "content" if state == "reasoning" else "reasoning"
            self.reasoning_bounds.append(self._end - len(self._text))
        self._after_mark = True
        before_mark: list[AnswerDelta] = [self._shown(shown, state)] if shown else []
        self._last = ""
        if state == "content":
            self._gaps.add(before[len(shown) :])
        return before_mark

    def _give_out(self) -> list[AnswerDelta]:
        """Return the received text. Keep a suffix that may belong to a mark, and the white space before that suffix."""
        assert self._state != "call"
        text = self._text
        held = max(overlap(text, mark) for mark in self._marks[self._state])
        if self._bare is not None and self._state == "content":
            held = max(held, self._bare.overlap(text))
        if self._calls_at_end is not None and self._state == "reasoning":
            held = max(held, len(text) - self._calls_at_end.find(text))
        end = len(text[: len(text) - held].rstrip())
        begin = len(text) - len(text.lstrip()) if self._after_mark else 0
        if end <= begin:
            return []
        if self._after_mark:
            self._stripped(text[:end])
        self._after_mark = False
        if self._bare is not None and self._state == "content":
            self._bare.pass_content()
        self._text = text[end:]
        return [self._shown(text[begin:end])]

    def _stripped(self, text: str) -> str:
        """Return text after a mark without the white space at its start. In content, record that space as a gap."""
        stripped = text.lstrip()
        if self._state == "content":
            self._gaps.add(text[: len(text) - len(stripped)])
        return stripped

    def _shown(self, text: str, state: Literal["content", "reasoning"] | None = None) -> TextDelta:
        """Return the delta of a text that belongs to ``state``; None stands for the current state."""
        kind = state or self._state
        assert kind != "call"
        if kind == "content":
            self._last = text[-1]
        return TextDelta(kind, self._gaps.before(text) if kind == "content" else text)

    def _end_call(self, body: str, end: str, *, complete: bool = True, truncated: bool = False) -> list[AnswerDelta]:
        assert self._calls is not None
        before, self._before_call = self._before_call, ""
        deltas = self._calls.read_to_end(before, body, end, complete=complete, truncated=truncated)
        if self._bare is not None:
            self._bare.pass_content()
        if any(isinstance(delta, TextDelta) for delta in deltas):
            self._after_mark = False
        return deltas


class _CallsAtEnd:
    """Finds calls at the end of reasoning.

    Args:
        tool: parser of the call format.
        names: names of the tools.
    """

    def __init__(self, tool: ToolParser, names: Sequence[str]) -> None:
        self._begin = tool.tool_call_start
        self._end = tool.tool_call_end
        # A call names its tool at its beginning. Other text with the mark is prose about calls.
        named = "|".join(map(re.escape, names))
        self._head = re.compile(rf"{re.escape(self._begin)}\s{{0,8}}(?:.{{0,30}}?[\"'=.:\[>])?(?:{named})\b", re.DOTALL)
        self._longest_head = len(self._begin) + 40 + max(map(len, names))
        # Position of the last found call, from the start of the first found call. None after text without calls.
        self._last: int | None = None

    def forget(self) -> None:
        """Record that the next text does not begin with the calls that were found."""
        self._last = None

    def find(self, text: str) -> int:
        """Return the position from which a text consists only of calls. The last call may be incomplete.

        If the text does not end with a call, return the position of a suffix that may become an opening mark. Without
        such a suffix, return the length of the text.

        If this method has found calls before, ``text`` must begin with them, after optional white space. They are not
        searched again.
        """
        start = len(text) - len(text.lstrip())
        found, self._last = None if self._last is None else start + self._last, None
        at = text.rfind(self._begin)
        closed = text.find(self._end, at)
        is_call = at >= 0 and (len(text) - at < self._longest_head or self._head.match(text, at))
        if not is_call or (closed >= 0 and not self._begin.startswith(text[closed + len(self._end) :].strip())):
            return len(text) - overlap(text, self._begin)
        last = at
        while at != found:
            before = text[:at].rstrip()
            earlier = before.rfind(self._begin) if before.endswith(self._end) else -1
            if earlier < 0:
                break
            at = earlier
        else:
            at = start
        self._last = last - at
        return at

    def has_ended(self, text: str) -> bool:
        """Return True if a text ends with a call's closing mark."""
        return text.rstrip().endswith(self._end)


class _BareOpenings:
    """Finds calls without an opening mark, by the text around a tool's name (:class:`BareOpening`)."""

    def __init__(self, opening: BareOpening, names: Sequence[str]) -> None:
        self._before = opening.before
        self._only_first = opening.only_first
        self._openings = [f"{opening.before}{name}{opening.after}" for name in names]
        self._longest = max(map(len, self._openings))
        self._pattern = re.compile("|".join(map(re.escape, self._openings)))
        self._is_possible = True

    def pass_content(self) -> None:
        """Record that content or a call precedes the next text."""
        self._is_possible = not self._only_first

    def find(self, text: str, searched: int) -> int:
        """Return the position of the first opening; -1 if there is none.

        The first ``searched`` characters contain no whole opening.
        """
        if not self._is_possible:
            return -1
        found = self._pattern.search(text, max(searched - self._longest + 1, 0))
        if found is None or (self._only_first and text[: found.start()].strip()):
            return -1
        return found.start()

    def overlap(self, text: str) -> int:
        """Return the length of the text's end that could become an opening when more text arrives."""
        if not self._is_possible:
            return 0
        at = text.rfind(self._before, max(len(text) - self._longest, 0))
        if at >= 0 and any(opening.startswith(text[at:]) for opening in self._openings):
            return len(text) - at
        return overlap(text, self._before)
