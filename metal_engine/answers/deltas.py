"""Data classes for the parts of an answer: deltas while its text arrives, and the whole :class:`Answer`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Next piece of content or reasoning."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call. ``index`` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Next piece of a call's arguments. All pieces of a call form a JSON object."""

    index: int
    text: str


AnswerDelta = TextDelta | CallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call. ``arguments`` is a JSON object as text, incomplete if the output was cut off within it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Parsed text of a whole output.

    Attributes:
        content: text for the user; None if the answer consists of tool calls only.
        reasoning: text of the reasoning; None if the model did not reason.
        tool_calls: tool calls in their order.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def assemble(deltas: Iterable[AnswerDelta]) -> Answer:
    """Assemble all deltas of an output into an Answer."""
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
    """Merge neighbouring texts of the same kind. Return the deltas."""
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
    """Return a value as JSON text that can be encoded as UTF-8: lone surrogates are escaped.

    Raises:
        TypeError: the value has no JSON form, such as a set.
        ValueError: the value contains NaN or an infinity.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which the model wrote as an escape
        text = json.dumps(value, allow_nan=False)
    return text
