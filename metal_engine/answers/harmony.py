"""Parses gpt-oss's format ("harmony"): an output is a sequence of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>Answer.<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"argument": 1}<|call|>

Headers vary: the recipient can precede the channel, and a type can follow. This module converts headers to a canonical
form, in which a :class:`metal_engine.answers.mark_splitter.MarkSplitter` recognizes the messages by their marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat, ReasoningMarks
from metal_engine.answers.call_end import CallEnd
from metal_engine.answers.call_syntaxes.json_formats import HARMONY
from metal_engine.answers.call_syntaxes.syntax import NO_QUOTES, ExactParser
from metal_engine.answers.deltas import AnswerDelta, TextDelta, joined
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.answers.splitter import overlap

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
# Special tokens of the format. A model uses the format if its vocabulary has all of them.
TOKENS = (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN)

_ENDS = (_END, _CALL, _RETURN, _START)  # a stray <|start|> also ends the message
_HEADER_BEGINNINGS = (_START, _CHANNEL, _MESSAGE, "to=")
_NAME = re.compile(r".*" + re.escape(_CHANNEL) + r"\s*(\w+)", re.DOTALL)  # the last channel counts
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# Models sometimes leave out the namespace of the recipient.
_CALL_TEXT = re.compile(r"(?:functions\.)?([^<]+)" + re.escape(_MESSAGE) + "(.*)", re.DOTALL)
# Beginning of a header, which may end within a mark. It starts with a mark or a recipient.
_HEADER = re.compile(r"\s*((<\|(start|channel)\|>|to=)(<\|\w+\|>|to=\S*+|\w|\s)*+)?(<(\|\w*\|?)?)?")

# Maximum length in characters. Longer text is not a header.
_MAX_HEADER = 1000


class HarmonyCalls:
    """Parser of gpt-oss's calls in the canonical form ``<|channel|>commentary to=NAME<|message|>ARGUMENTS<|call|>``.

    Implements :class:`metal_engine.answers.answer_format.ToolParser`.
    """

    tool_call_start = f"{_CHANNEL}commentary to="
    tool_call_end = _CALL

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        found = _CALL_TEXT.fullmatch(text)
        if found is None:
            raise ValueError("the text is not a call of a function")
        return {"name": found[1], "arguments": json.loads(found[2] or "{}")}


def harmony_format(*, calls: bool = True) -> AnswerFormat:
    """Return the output format of gpt-oss. ``calls`` is True if tool calls are parsed."""
    return AnswerFormat(
        tool=ExactParser(HARMONY, HarmonyCalls()) if calls else None,
        syntax=HARMONY if calls else None,
        call_head=re.compile(r"(?:functions\.)?(?P<name>[^<]{1,256})" + re.escape(_MESSAGE) + r"\s*(?=\{)"),
        reasoning=ReasoningMarks(
            f"{_CHANNEL}analysis{_MESSAGE}",
            _END,
            next_message=f"{_START}assistant",
            content_start=f"{_CHANNEL}final{_MESSAGE}",
        ),
        special=True,
        harmony=True,
        finds_calls=calls,
    )


class HarmonySplitter(MarkSplitter):
    """Splits an output in gpt-oss's format.

    If the output does not begin with a header, its first text is content, because a grammar may force content at once.

    Args:
        in_content: True if the prompt ends within content, so that the output begins without a header.
        is_structured: True if the first content is a structured output, which lasts until the end of the output.
        options: other arguments of ``MarkSplitter``.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tools: Sequence[dict[str, Any]] = (),
        *,
        in_reasoning: bool = False,
        in_content: bool = False,
        is_structured: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(answer_format, tools, in_reasoning=in_reasoning, **options)
        self._is_structured = is_structured
        self._is_verbatim = False  # True within the structured output
        self._raw = ""  # received text that was not passed to `MarkSplitter` yet
        self._in_header = not (in_reasoning or in_content)
        self._is_first = not in_content
        self._end_mark = _END if in_reasoning else ""  # end mark of the current message in the canonical form
        self._had_content = in_content
        self._message_end = CallEnd(NO_QUOTES, _ENDS)  # search for the end of the current message

    def add(self, text: str) -> list[AnswerDelta]:
        self._raw += text
        deltas: list[AnswerDelta] = []
        while (more := self._take_header() if self._in_header else self._take_body()) is not None:
            deltas += more
        if self._is_verbatim:
            content, self._raw = self._raw, ""
            deltas += [TextDelta("content", content)] if content else []
        elif not self._in_header:
            held = max(overlap(self._raw, mark) for mark in _ENDS)
            num_escapes = len(self._raw) - len(self._raw.rstrip("\\"))
            held = max(held, num_escapes % 2)  # keep a backslash together with the character that it may escape
            deltas += self._pass_on(len(self._raw) - held)
        return joined(deltas)

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        # An incomplete header is dropped. Other text is passed on, for example a recipient that the model itself ends.
        is_header = _HEADER.fullmatch(self._raw) is not None and (truncated or "<|" in self._raw)
        is_lost = self._in_header and is_header
        deltas = [] if is_lost else self._pass_on(len(self._raw))
        return joined(deltas + super().finish(truncated=truncated))

    def _take_header(self) -> list[AnswerDelta] | None:
        """Parse the header of a message. Return the resulting deltas, or None if the header is incomplete.

        A text longer than ``_MAX_HEADER`` is not a header. It is parsed as the text of a message.
        """
        if self._is_first:
            begun = self._raw.lstrip()
            is_begun = any(mark.startswith(begun) for mark in _HEADER_BEGINNINGS)
            if not is_begun and not begun.startswith(_HEADER_BEGINNINGS):
                self._is_first = self._in_header = False
                self._had_content = True
                self._is_verbatim = self._is_structured
                return []
        limit = _MAX_HEADER + len(_MESSAGE)
        at = self._raw.find(_MESSAGE, 0, limit)
        if at < 0 and len(self._raw) < limit:
            return None
        self._is_first = self._in_header = False
        self._message_end = CallEnd(NO_QUOTES, _ENDS)
        if at < 0:
            return []
        header = self._raw[:at]
        channel, recipient = _NAME.match(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            self._message_end = CallEnd(HARMONY.quotes(()), _ENDS)
            self._end_mark, shown = _CALL, f"{HarmonyCalls.tool_call_start}{recipient[1]}{_MESSAGE}"
        elif channel is not None and channel[1] == "analysis":
            self._end_mark, shown = _END, f"{_CHANNEL}analysis{_MESSAGE}"
        else:
            shown = "\n\n" if self._had_content else ""
            self._had_content = True
            self._is_verbatim = self._is_structured
        return self._replace(at + len(_MESSAGE), shown)

    def _take_body(self) -> list[AnswerDelta] | None:
        """Parse the rest of a message. Return the resulting deltas, or None if the message is incomplete."""
        found = None if self._is_verbatim else self._message_end.find(self._raw)
        if found is None:
            return None
        at, mark = found
        deltas = self._pass_on(at)
        self._in_header = True
        end, self._end_mark = self._end_mark, ""
        return deltas + self._replace(len(mark), end)

    def _pass_on(self, length: int) -> list[AnswerDelta]:
        """Pass the next ``length`` characters to ``MarkSplitter`` unchanged. Return the resulting deltas."""
        text, self._raw = self._raw[:length], self._raw[length:]
        self._message_end.forget(length)
        return self.take(text, length) if text else []

    def _replace(self, length: int, text: str) -> list[AnswerDelta]:
        """Pass ``text`` to ``MarkSplitter`` in place of the next ``length`` characters. Return the resulting deltas."""
        self._raw = self._raw[length:]
        return self.take(text, length)
