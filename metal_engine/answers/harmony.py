"""The format of gpt-oss ("harmony"): an answer is messages, each with a header that names its channel.

    <|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>Answer.<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"argument": 1}<|call|>

Headers vary: the recipient may stand before the channel, a type may follow. They are put into one form here, in which
a :class:`metal_engine.answers.mark_splitter.MarkSplitter` knows them by their marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat, ReasoningMarks
from metal_engine.answers.deltas import AnswerDelta, joined
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.answers.splitter import overlap

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
# Special tokens; a vocabulary that has them all is of this format.
TOKENS = (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN)

_ENDS = (_END, _CALL, _RETURN, _START)  # the last should not come, but begins a message in any case
_HEADER_BEGINNINGS = (_START, _CHANNEL, _MESSAGE, "to=")
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# Models sometimes leave out the namespace of the recipient.
_CALL_TEXT = re.compile(r"(?:functions\.)?([^<]+)" + re.escape(_MESSAGE) + "(.*)", re.DOTALL)
# The beginning of a header: it has a mark or a recipient, or the beginning of a mark.
_HEADER = re.compile(r"\s*((<\|(start|channel)\|>|to=)(<\|\w+\|>|to=\S*+|\w|\s)*+)?(<(\|\w*\|?)?)?")

# Characters; what goes on for longer is not a header.
_MAX_HEADER = 1000


class HarmonyCalls:
    """Implements :class:`metal_engine.answers.answer_format.ToolParser` for calls in the one form."""

    tool_call_start = f"{_CHANNEL}commentary to="
    tool_call_end = _CALL

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        found = _CALL_TEXT.fullmatch(text)
        if found is None:
            raise ValueError("it calls none of the functions")
        return {"name": found[1], "arguments": json.loads(found[2] or "{}")}


def harmony_format(*, calls: bool = True) -> AnswerFormat:
    """The format; ``calls`` says whether tool calls are parsed."""
    return AnswerFormat(
        tool=HarmonyCalls() if calls else None,
        call_head=re.compile(r"(?:functions\.)?(?P<name>[^<]{1,256})" + re.escape(_MESSAGE) + r"\s*(?=\{)"),
        reasoning=ReasoningMarks(f"{_CHANNEL}analysis{_MESSAGE}", _END),
        special=True,
        harmony=True,
        finds_calls=calls,
    )


class HarmonySplitter(MarkSplitter):
    """Splits messages; the arguments are those of ``MarkSplitter``.

    Text that does not begin with a header is content: a grammar may force such an answer.
    """

    def __init__(self, answer_format: AnswerFormat, tools: Sequence[dict[str, Any]] = (), **options: Any) -> None:
        super().__init__(answer_format, tools, **options)
        self._raw = ""  # taken, and not passed on
        self._in_header = True
        self._is_first = True
        self._end_mark = ""  # what the message under way ends with in the one form
        self._had_content = False

    def add(self, text: str) -> list[AnswerDelta]:
        self._raw += text
        deltas: list[AnswerDelta] = []
        while (more := self._take_header() if self._in_header else self._take_body()) is not None:
            deltas += more
        if not self._in_header:
            held = max(overlap(self._raw, mark) for mark in _ENDS)
            deltas += self._pass_on(len(self._raw) - held)
        return joined(deltas)

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        # Nothing is shown of the beginning of a header; other text is not lost.
        is_lost = self._in_header and _HEADER.fullmatch(self._raw) is not None
        deltas = [] if is_lost else self._pass_on(len(self._raw))
        return joined(deltas + super().finish(truncated=truncated))

    def _take_header(self) -> list[AnswerDelta] | None:
        """Takes a header; returns what it comes to, or None if it is not complete."""
        if self._is_first:
            begun = self._raw.lstrip()
            is_begun = any(mark.startswith(begun) for mark in _HEADER_BEGINNINGS)
            if not is_begun and not begun.startswith(_HEADER_BEGINNINGS):
                self._is_first = self._in_header = False
                self._had_content = True
                return []
        limit = _MAX_HEADER + len(_MESSAGE)
        at = self._raw.find(_MESSAGE, 0, limit)
        if at < 0 and len(self._raw) < limit:
            return None
        self._is_first = self._in_header = False
        if at < 0:
            return []
        header = self._raw[:at]
        channel, recipient = _NAME.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            self._end_mark, shown = _CALL, f"{HarmonyCalls.tool_call_start}{recipient[1]}{_MESSAGE}"
        elif channel is not None and channel[1] == "analysis":
            self._end_mark, shown = _END, f"{_CHANNEL}analysis{_MESSAGE}"
        else:
            shown = "\n\n" if self._had_content else ""
            self._had_content = True
        return self._replace(at + len(_MESSAGE), shown)

    def _take_body(self) -> list[AnswerDelta] | None:
        """Takes a message to its end; returns what it comes to, or None if it goes on."""
        found = [(at, mark) for mark in _ENDS if (at := self._raw.find(mark)) >= 0]
        if not found:
            return None
        at, mark = min(found)
        deltas = self._pass_on(at)
        self._in_header = True
        end, self._end_mark = self._end_mark, ""
        return deltas + self._replace(len(mark), end)

    def _pass_on(self, length: int) -> list[AnswerDelta]:
        """Passes so many characters on as they are."""
        text, self._raw = self._raw[:length], self._raw[length:]
        return self.take(text, length) if text else []

    def _replace(self, length: int, text: str) -> list[AnswerDelta]:
        """Passes ``text`` on in place of so many characters."""
        self._raw = self._raw[length:]
        return self.take(text, length)
