"""The parts of an answer: one by one while its text comes (deltas), and all together (:class:`Answer`)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More content, or more reasoning."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments: together they are a JSON object."""

    index: int
    text: str


AnswerDelta = TextDelta | CallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` is a JSON object as text, incomplete if the answer was cut off within it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        content: what the user is to see; None for an answer that is tool calls alone.
        reasoning: None where the model did not reason.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def assemble(deltas: Iterable[AnswerDelta]) -> Answer:
    """Puts a whole answer's deltas together."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    starts: list[CallStart] = []
    arguments: list[str] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            texts[delta.kind].append(delta.text)
        elif isinstance(delta, CallStart):
            starts.append(delta)
            arguments.append("")
        else:
            arguments[delta.index] += delta.text
    calls = tuple(ToolCall(start.id, start.name, text) for start, text in zip(starts, arguments, strict=True))
    content = "".join(texts["content"])
    return Answer(None if calls and not content else content, "".join(texts["reasoning"]) or None, calls)


def joined(deltas: list[AnswerDelta]) -> list[AnswerDelta]:
    """The same deltas, with neighbouring texts of one kind as one."""
    if len(deltas) < 2:
        return deltas
    result: list[AnswerDelta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta) and last.kind == delta.kind:
            result[-1] = TextDelta(delta.kind, last.text + delta.text)
        else:
            result.append(delta)
    return result


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def json_text(value: Any) -> str:
    """JSON as clients get it. Raises ValueError for what JSON cannot say, such as NaN."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which the model wrote as an escape
        text = json.dumps(value, allow_nan=False)
    return text
