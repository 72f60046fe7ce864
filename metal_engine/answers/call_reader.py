"""Reads the tool calls that an output has between marks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from re import Pattern
from typing import Any

from metal_engine.answers.answer_format import ToolParser
from metal_engine.answers.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    CallStart,
    TextDelta,
    ToolCall,
    json_text,
    new_call_id,
)
from metal_engine.answers.json_reader import JSONObjectReader
from metal_engine.answers.splitter import ContentGaps
from metal_engine.errors import short

logger = logging.getLogger(__name__)


class CallReader:
    """Reads the tool calls of one output, each from the text between its marks.

    Args:
        parser: parser of the call format.
        tools: tools that may be called, in OpenAI's form.
        parallel: True if several calls are allowed. Otherwise, calls after the first one are dropped.
        head: ``call_head`` of the ``AnswerFormat``, to stream a call's arguments; None to return only whole calls. The
            last brace of streamed arguments is returned only after the call has been parsed.
        gaps: ``ContentGaps`` of the output's splitter, to which white space next to calls is added; None for a new
            object.

    Attributes:
        num_calls: number of calls parsed successfully so far.
    """

    def __init__(
        self,
        parser: ToolParser,
        tools: Sequence[dict[str, Any]],
        *,
        parallel: bool = True,
        head: Pattern[str] | None = None,
        gaps: ContentGaps | None = None,
    ) -> None:
        self._gaps = gaps or ContentGaps()
        self.num_calls = 0
        self._parser = parser
        self._tools = list(tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._parallel = parallel
        self._head = head
        self._begun: _BegunCall | None = None
        self._num_started = 0
        self._ids: set[str] = set()

    def read_more(self, body: str) -> list[AnswerDelta]:
        """Return the new deltas of a call whose text after the opening mark is ``body`` so far.

        The list is empty if the call's arguments are not streamed.
        """
        deltas: list[AnswerDelta] = []
        begun = self._begun
        if begun is None:
            found = self._head.match(body) if self._head is not None else None
            is_wanted = self._parallel or not self._num_started
            if found is None or found["name"] not in self._names or not is_wanted:
                return []
            begun = self._begun = _BegunCall(self._num_started, found["name"], found.end())
            self._num_started += 1
            deltas.append(CallStart(begun.index, self._unused_id(found.groupdict().get("id")), begun.name))
        if arguments := begun.read(body):
            deltas.append(ArgumentsDelta(begun.index, arguments))
        return deltas

    def read_to_end(self, before: str, body: str, end: str, *, complete: bool, truncated: bool) -> list[AnswerDelta]:
        """Return the remaining deltas of a call that has ended. Text that is not a valid call becomes content.

        If the output was cut off within a call whose arguments are streamed, the text of the call does not become
        content. The arguments then stay incomplete.

        Args:
            before: text directly before ``body``: white space and the opening mark. It is returned with ``body`` if the
                text becomes content.
            body: text of the call between its marks.
            end: closing mark of the call.
            complete: True to parse ``body`` as a call. False if ``body`` lacks its end.
            truncated: True if the output was cut off, for example by ``max_tokens``.
        """
        deltas = self.read_more(body)
        begun, self._begun = self._begun, None
        items: list[ToolCall | str] = []
        problem = "it was cut off"
        if complete:
            try:
                items = self._parsed(body)
                problem = "the text has no call"
                if begun is not None and items and not begun.is_same(items[0]):
                    items, problem = [], f"the text differs from the call of {begun.name} that was already streamed"
            except Exception as error:  # noqa: BLE001  (parsers raise any type of exception)
                problem = f"{type(error).__name__}: {error}"
        is_call = any(isinstance(item, ToolCall) for item in items)
        if not is_call and begun is not None and truncated:
            logger.warning("the arguments of a call of %s were cut off", begun.name)
            return deltas
        if not is_call:
            text = before + body + end
            logger.warning("a malformed tool call is returned as text: %s: %.200r", problem, text)
            return [*deltas, TextDelta("content", self._gaps.before(text))]
        if begun is not None:
            deltas.append(ArgumentsDelta(begun.index, "}"))
            self.num_calls += 1
            items = items[1:]
        return deltas + self._deltas_of(items)

    def _deltas_of(self, items: Sequence[ToolCall | str]) -> list[AnswerDelta]:
        """Return the deltas of whole calls, and of the text between them.

        Without ``parallel``, calls after the output's first call are dropped.
        """
        deltas: list[AnswerDelta] = []
        for call in items:
            if isinstance(call, str):
                text = call.strip()
                self._gaps.add(call[: len(call) - len(call.lstrip())])
                if text:
                    deltas.append(TextDelta("content", self._gaps.before(text)))
                    self._gaps.add(call[len(call.rstrip()) :])
                continue
            if self._num_started and not self._parallel:
                logger.info("left out a call of %s: parallel_tool_calls is false", call.name)
                continue
            deltas.append(CallStart(self._num_started, self._unused_id(call.id), call.name))
            deltas.append(ArgumentsDelta(self._num_started, call.arguments))
            self._num_started += 1
            self.num_calls += 1
        return deltas

    def _unused_id(self, given: str | None) -> str:
        """Return ``given``, the id that the model wrote. Return a new id if ``given`` is empty or already in use."""
        call_id = new_call_id() if not given or given in self._ids else given
        self._ids.add(call_id)
        return call_id

    def _parsed(self, body: str) -> list[ToolCall | str]:
        """Return the calls in ``body``, and the texts before, between and after them, in their order.

        Raises:
            Exception: the text is not a call, or calls an unknown tool. The type depends on the parser.
        """
        parsed = self._parser.parse_tool_call(body, self._tools)
        items = parsed if isinstance(parsed, list) else [parsed]
        return [item if isinstance(item, str) else self._checked(item) for item in items if item != ""]

    def _checked(self, call: Any) -> ToolCall:
        """Convert a call from the parser to a ToolCall.

        Raises:
            Exception: the call names an unknown tool, or its arguments are not a JSON object. The type varies.
        """
        name, arguments = call["name"], call.get("arguments", {})
        if name not in self._names:
            raise ValueError(f"there is no tool {short(name)}")
        text = None
        if isinstance(arguments, str):  # JSON within JSON
            text, arguments = arguments, json.loads(arguments, parse_constant=_refuse)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments must be a JSON object, got {short(arguments)}")
        given_id = call.get("id")
        call_id = given_id if isinstance(given_id, str) and given_id and _can_be_encoded(given_id) else new_call_id()
        return ToolCall(call_id, name, json_text(arguments) if text is None or not _can_be_encoded(text) else text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _can_be_encoded(text: str) -> bool:
    """Return False if a text has a lone surrogate, which a model can write as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _BegunCall:
    """Call whose arguments are streamed.

    Args:
        index: index of the call in the output.
        name: name of the tool.
        start: position at which the arguments begin in the call's text.
    """

    def __init__(self, index: int, name: str, start: int) -> None:
        self.index = index
        self.name = name
        self._reader = JSONObjectReader()
        self._at = start
        self._arguments: list[str] = []

    def read(self, body: str) -> str:
        """Return the new part of the arguments, without their last brace. ``body`` is the call's text so far."""
        end = self._at + self._reader.add(body[self._at :])
        more, self._at = body[self._at : end], end
        if more and self._reader.done:
            more = more[:-1]
        self._arguments.append(more)
        return more

    def is_same(self, call: ToolCall | str) -> bool:
        """Return True if ``call`` has the name and the arguments that were streamed."""
        if isinstance(call, str) or not self._reader.done or call.name != self.name:
            return False
        own = json.loads("".join(self._arguments) + "}")
        return bool(own == json.loads(call.arguments))
