"""Generated text, as it comes, into what it is: content, reasoning, tool calls.

Nothing is lost: what looks like a tool call and is none is content.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from metal_engine.answers.formats import Parsers
from metal_engine.answers.json_reader import JSONObjectReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More content, or more reasoning."""

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; ``index`` counts them from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: together they are a JSON object."""

    index: int
    text: str


Piece = TextPiece | CallStart | CallArguments


class Splitter(Protocol):
    """Takes one answer's text in pieces of any size; where it was cut makes no difference to the sum.

    Attributes:
        in_reasoning: what comes next is reasoning, as far as is known.
        num_calls: tool calls so far, without those that proved to be none.
    """

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def num_calls(self) -> int: ...

    def add(self, text: str) -> list[Piece]:
        """What more text has come to."""
        ...

    def finish(self, *, truncated: bool) -> list[Piece]:
        """What was held back, once there is no more text; ``truncated`` if the model had not come to its end."""
        ...


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class PlainSplitter:
    """Everything is content."""

    in_reasoning = False
    num_calls = 0

    def add(self, text: str) -> list[Piece]:
        return [TextPiece("content", text)] if text else []

    def finish(self, *, truncated: bool) -> list[Piece]:
        return []


class MarkSplitter:
    """Finds what stands between marks. White space beside a mark belongs to the mark.

    Args:
        tools: those that may be called, in OpenAI's form; empty to leave tool calls in the text.
        in_reasoning: the prompt has begun the reasoning already.
        parallel: whether more than one call is wanted; if not, further ones are left out.
        incremental: give out a call's arguments as they come, where the format allows it. Their last brace comes
            when the call has proved to be one; should it not, its text is content, as that of any malformed call.
    """

    def __init__(
        self,
        parsers: Parsers,
        tools: Sequence[dict[str, Any]] = (),
        *,
        in_reasoning: bool = False,
        parallel: bool = True,
        incremental: bool = False,
    ) -> None:
        self.num_calls = 0
        self._tool = parsers.tool if tools else None
        self._reasoning = parsers.reasoning
        self._tools = list(tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._parallel = parallel
        self._head = parsers.call_head if incremental else None
        self._begun: _BegunCall | None = None
        self._num_started = 0
        self._state: Literal["content", "reasoning", "call"] = "reasoning" if in_reasoning else "content"
        self._text = ""  # taken, and not given out
        self._after_mark = in_reasoning
        self._before_call = ""  # white space

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    # --- text in, pieces out ---

    def add(self, text: str) -> list[Piece]:
        searched = len(self._text)
        self._text += text
        pieces: list[Piece] = []
        while (found := self._next_mark(searched)) is not None:
            at, mark = found
            before, self._text = self._text[:at], self._text[at + len(mark) :]
            pieces += self._cross(before, mark)
            searched = 0
        pieces += self._more_of_call(self._text) if self._state == "call" else self._give_out()
        return _joined(pieces)

    def finish(self, *, truncated: bool) -> list[Piece]:
        rest, self._text = self._text, ""
        if self._state != "call":
            if self._after_mark:
                rest = rest.lstrip()
            return [TextPiece(self._state, rest)] if rest else []
        assert self._tool is not None
        # A model that ends its turn within a call may have forgotten the mark; one that was cut off has not.
        complete = not truncated or not self._tool.tool_call_end
        return _joined(self._call(rest, "", complete=complete, truncated=truncated))

    def _marks(self) -> list[str]:
        """What may come next and change the state."""
        if self._state == "reasoning":
            assert self._reasoning is not None
            return [self._reasoning.end]
        if self._state == "call":
            assert self._tool is not None
            return [self._tool.tool_call_end or self._tool.tool_call_start]
        starts = [self._reasoning.start] if self._reasoning else []
        return [*starts, self._tool.tool_call_start] if self._tool else starts

    def _next_mark(self, searched: int) -> tuple[int, str] | None:
        """Place and text of the first mark; ``searched`` characters have been looked at before."""
        found = []
        for mark in self._marks():
            at = self._text.find(mark, max(searched - len(mark) + 1, 0))
            if at >= 0:
                found.append((at, mark))
        return min(found, default=None)

    def _cross(self, before: str, mark: str) -> list[Piece]:
        """Leave a state at its mark."""
        state = self._state
        if state == "call":
            assert self._tool is not None
            if not self._tool.tool_call_end:  # the mark begins the next call
                return self._call(before, "", complete=True)
            self._state, self._after_mark = "content", True
            return self._call(before, mark, complete=True)
        if self._after_mark:
            before = before.lstrip()
        shown = before.rstrip()
        is_call = self._tool is not None and state == "content" and mark == self._tool.tool_call_start
        self._before_call = before[len(shown) :] if is_call else ""
        self._state = "call" if is_call else "content" if state == "reasoning" else "reasoning"
        self._after_mark = True
        return [TextPiece(state, shown)] if shown else []

    def _give_out(self) -> list[Piece]:
        """What can no longer become part of a mark, or white space before one."""
        assert self._state != "call"
        text = self._text
        held = max(overlap(text, mark) for mark in self._marks())
        end = len(text[: len(text) - held].rstrip())
        begin = len(text) - len(text.lstrip()) if self._after_mark else 0
        if end <= begin:
            return []
        self._after_mark = False
        self._text = text[end:]
        return [TextPiece(self._state, text[begin:end])]

    # --- calls ---

    def _more_of_call(self, body: str) -> list[Piece]:
        """What there is to say of a call that has come so far, if its arguments are given out as they come."""
        pieces: list[Piece] = []
        begun = self._begun
        if begun is None:
            found = self._head.match(body) if self._head is not None else None
            if (
                found is None
                or found["name"] not in self._names
                or (self._num_started and not self._parallel)
            ):
                return []
            begun = self._begun = _BegunCall(self._num_started, found["name"], found.end())
            self._num_started += 1
            pieces.append(CallStart(begun.index, new_call_id(), begun.name))
        if arguments := begun.read(body):
            pieces.append(CallArguments(begun.index, arguments))
        return pieces

    def _call(self, body: str, end: str, *, complete: bool, truncated: bool = False) -> list[Piece]:
        """A call's pieces, those that have not been given out; or, if it is none, its text."""
        assert self._tool is not None
        pieces = self._more_of_call(body)
        begun, self._begun = self._begun, None
        calls: list[tuple[str, str, str]] = []
        problem = "it was cut off"
        if complete:
            try:
                parsed = self._tool.parse_tool_call(body, self._tools)
                calls = [self._checked(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
                problem = "there is none in it"
                if begun is not None and calls and not begun.is_same(calls[0]):
                    calls, problem = [], f"it began as a call of {begun.name}"
            except Exception as error:  # noqa: BLE001  (whatever a parser makes of what a model wrote)
                problem = f"{type(error).__name__}: {error}"
        before, self._before_call = self._before_call, ""
        if not calls and begun is not None and truncated:
            logger.warning("the arguments of a call of %s were cut off", begun.name)
            return pieces
        if not calls:
            text = before + self._tool.tool_call_start + body + end
            logger.warning("a malformed tool call is given as text: %s: %.200r", problem, text)
            self._after_mark = False
            return [*pieces, TextPiece("content", text)]
        if begun is not None:
            pieces.append(CallArguments(begun.index, "}"))
            self.num_calls += 1
            calls = calls[1:]
        for call_id, name, arguments in calls:
            if self._num_started and not self._parallel:
                logger.info("left out a call of %s: parallel_tool_calls is false", name)
                continue
            pieces += [
                CallStart(self._num_started, call_id, name),
                CallArguments(self._num_started, arguments),
            ]
            self._num_started += 1
            self.num_calls += 1
        return pieces

    def _checked(self, call: Any) -> tuple[str, str, str]:
        """Id, name and arguments (JSON) of a parsed call. Raises ValueError if it is not one of the tools'."""
        name, arguments = call["name"], call.get("arguments", {})
        if name not in self._names:
            raise ValueError(f"there is no tool {name!r}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments are no object: {arguments!r}")
        given_id = call.get("id")
        call_id = given_id if isinstance(given_id, str) and given_id else new_call_id()
        return call_id, name, json_text(arguments)


class _BegunCall:
    """A call whose arguments are given out as they come.

    Args:
        start: where the arguments begin in the call's text.
    """

    def __init__(self, index: int, name: str, start: int) -> None:
        self.index = index
        self.name = name
        self._reader = JSONObjectReader()
        self._at = start
        self._arguments: list[str] = []

    def read(self, body: str) -> str:
        """More of the arguments, of a call's text so far; without their last brace."""
        end = self._at + self._reader.add(body[self._at :])
        more, self._at = body[self._at : end], end
        if more and self._reader.done:
            more = more[:-1]
        self._arguments.append(more)
        return more

    def is_same(self, call: tuple[str, str, str]) -> bool:
        """Whether this has become that call."""
        _, name, arguments = call
        if not self._reader.done or name != self.name:
            return False
        own = json.loads("".join(self._arguments) + "}")
        return bool(own == json.loads(arguments))


def json_text(value: Any) -> str:
    """JSON as clients get it. Raises ValueError for what JSON cannot say, such as NaN."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which the model wrote as an escape
        text = json.dumps(value, allow_nan=False)
    return text


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``, and is not all of it."""
    if mark[0] not in text[-len(mark) :]:
        return 0
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece) and last.kind == piece.kind:
            joined[-1] = TextPiece(piece.kind, last.text + piece.text)
        else:
            joined.append(piece)
    return joined
