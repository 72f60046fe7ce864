"""The format of gpt-oss ("harmony"): an answer is messages, each with a header that names its channel.

    <|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>Answer.<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"argument": 1}<|call|>

Headers vary: the recipient may stand before the channel, a type may follow. They are put into one form here, in which
:class:`metal_engine.answers.pieces.MarkSplitter` knows them by their marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from metal_engine.answers.formats import Parsers, ReasoningMarks
from metal_engine.answers.pieces import MarkSplitter, Piece, overlap

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
# Special tokens; a vocabulary that has them all is of this format.
TOKENS = (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN)

_ENDS = (_END, _CALL, _RETURN, _START)  # the last should not come, but begins a message in any case
_HEADER_BEGINNINGS = (_START, _CHANNEL, _MESSAGE, "to=")
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CALL_TEXT = re.compile(r"functions\.([^<]+)" + re.escape(_MESSAGE) + "(.*)", re.DOTALL)
# A header that is not complete, though it is one: it has a mark or a recipient, or the beginning of a mark.
_HEADER = re.compile(r"\s*((<\|(start|channel)\|>|to=)(<\|\w+\|>|to=\S*+|\w|\s)*+)?(<(\|\w*\|?)?)?")


# Characters; what goes on for longer is no header.
_MAX_HEADER = 1000


class HarmonyCalls:
    """Implements :class:`metal_engine.answers.formats.ToolParser`, of calls in the one form."""

    tool_call_start = f"{_CHANNEL}commentary to="
    tool_call_end = _CALL

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        found = _CALL_TEXT.fullmatch(text)
        if found is None:
            raise ValueError("it calls none of the functions")
        return {"name": found[1], "arguments": json.loads(found[2] or "{}")}


def harmony_parsers(*, calls: bool = True, auto_tool_choice: bool = True) -> Parsers:
    """``calls``: whether tool calls are parsed."""
    return Parsers(
        tool=HarmonyCalls() if calls else None,
        call_head=re.compile(r"functions\.(?P<name>[^<]{1,256})" + re.escape(_MESSAGE) + r"\s*(?=\{)"),
        reasoning=ReasoningMarks(f"{_CHANNEL}analysis{_MESSAGE}", _END),
        special=True,
        auto_tool_choice=auto_tool_choice,
        harmony=True,
    )


class HarmonySplitter:
    """Implements :class:`metal_engine.answers.pieces.Splitter`; the arguments are those of ``MarkSplitter``.

    Text that does not begin with a header, as that of an answer which a grammar forces, is content.
    """

    def __init__(self, parsers: Parsers, tools: Sequence[dict[str, Any]] = (), **options: Any) -> None:
        self._marks = MarkSplitter(parsers, tools, **options)
        self._text = ""  # taken, and not passed on
        self._in_header = True
        self._is_first = True
        self._end = ""  # what the message under way ends with in the one form
        self._had_content = False

    @property
    def in_reasoning(self) -> bool:
        return self._marks.in_reasoning

    @property
    def num_calls(self) -> int:
        return self._marks.num_calls

    def add(self, text: str) -> list[Piece]:
        self._text += text
        translated = ""
        while (more := self._header() if self._in_header else self._body()) is not None:
            translated += more
        if not self._in_header:
            held = max(overlap(self._text, mark) for mark in _ENDS)
            translated += self._text[: len(self._text) - held]
            self._text = self._text[len(self._text) - held :]
        return self._marks.add(translated) if translated else []

    def finish(self, *, truncated: bool) -> list[Piece]:
        # Of a header that is not complete nothing is shown, but what is none is not lost.
        is_lost = self._in_header and _HEADER.fullmatch(self._text) is not None
        pieces = self._marks.add(self._text) if self._text and not is_lost else []
        return pieces + self._marks.finish(truncated=truncated)

    def _header(self) -> str | None:
        """Take a header; what it comes to, or None if it is not complete."""
        if self._is_first:
            begun = self._text.lstrip()
            is_begun = any(mark.startswith(begun) for mark in _HEADER_BEGINNINGS)
            if not is_begun and not begun.startswith(_HEADER_BEGINNINGS):
                self._is_first = self._in_header = False
                self._had_content = True
                return ""
        header, mark, rest = self._text.partition(_MESSAGE)
        if not mark and len(header) <= _MAX_HEADER:
            return None
        if not mark:
            self._is_first = self._in_header = False
            return ""
        self._text, self._in_header, self._is_first = rest, False, False
        channel, recipient = _NAME.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            self._end = _CALL
            return f"{HarmonyCalls.tool_call_start}{recipient[1]}{_MESSAGE}"
        if channel is not None and channel[1] == "analysis":
            self._end = _END
            return f"{_CHANNEL}analysis{_MESSAGE}"
        self._end = ""
        before = "\n\n" if self._had_content else ""
        self._had_content = True
        return before

    def _body(self) -> str | None:
        """Take a message to its end; what it comes to, or None if it goes on."""
        found = [(at, mark) for mark in _ENDS if (at := self._text.find(mark)) >= 0]
        if not found:
            return None
        at, mark = min(found)
        body, self._text = self._text[:at], self._text[at + len(mark) :]
        self._in_header = True
        end, self._end = self._end, ""
        return body + end
