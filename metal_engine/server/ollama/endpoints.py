"""Endpoint classes of Ollama's generating routes.

A response is one JSON object, or a line of JSON for each piece (NDJSON). The last line has the counts.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from metal_engine.answers.deltas import AnswerDelta, ArgumentsDelta, CallStart
from metal_engine.server.errors import APIError
from metal_engine.server.generation.generation import Choice, ChoiceOutput, Generation
from metal_engine.server.generation.preparation import BodyT, Endpoint, ServedModel
from metal_engine.server.ollama.protocol import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatAnswer,
    GenerateAnswer,
    OllamaAnswer,
    OllamaError,
)
from metal_engine.server.openai.base_chat_endpoint import BaseChatEndpoint
from metal_engine.server.openai.completions import CompletionEndpoint
from metal_engine.server.usage import Usage

NDJSON = "application/x-ndjson"


def timestamp(seconds: float) -> str:
    """Format a time of :func:`time.time` as Ollama does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Pieces:
    """Converts the deltas of one output into pieces. A response merges all pieces. A stream sends each piece as a line.

    A tool call becomes a piece when it is complete, because its arguments are an object. Incomplete calls are dropped.
    """

    def __init__(self) -> None:
        self._open: CallStart | None = None
        self._arguments: list[str] = []
        self._num_calls = 0

    def add(self, deltas: list[AnswerDelta]) -> list[AnswerMessage]:
        """Add deltas. Return the pieces that they complete."""
        pieces: list[AnswerMessage] = []
        for delta in deltas:
            if isinstance(delta, ArgumentsDelta):
                self._arguments.append(delta.text)
                continue
            pieces += self.close()
            if isinstance(delta, CallStart):
                self._open = delta
            elif delta.kind == "content":
                pieces.append(AnswerMessage(content=delta.text))
            else:
                pieces.append(AnswerMessage(thinking=delta.text))
        return pieces

    def close(self) -> list[AnswerMessage]:
        """End the open call, if there is one. Return its piece in a list, which is empty if the call is incomplete."""
        start, text = self._open, "".join(self._arguments)
        self._open, self._arguments = None, []
        if start is None:
            return []
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(arguments, dict):
            return []
        function = CalledFunction(index=self._num_calls, name=start.name, arguments=arguments)
        self._num_calls += 1
        return [AnswerMessage(tool_calls=[AnswerToolCall(id=start.id, function=function)])]


def merged(pieces: list[AnswerMessage]) -> AnswerMessage:
    """Merge all pieces of a response into one."""
    calls = [call for piece in pieces for call in piece.tool_calls or ()]
    return AnswerMessage(
        content="".join(piece.content for piece in pieces),
        thinking="".join(piece.thinking or "" for piece in pieces) or None,
        tool_calls=calls or None,
    )


class OllamaEndpoint(Endpoint[BodyT]):
    """Base class of Ollama's generating endpoints. Subclasses define the shape of the response, and the prompt.

    Attributes:
        name: client's name of the model.
    """

    id_prefix = "ollama"
    has_choices = False
    stream_media_type = NDJSON
    name: str

    def _begin(self, name: str) -> None:
        self.name = name
        self._arrived = time.monotonic()
        self._pieces = Pieces()

    def _answer(self, piece: AnswerMessage, **fields: Any) -> OllamaAnswer:
        """Return a response, or a line of a response, that has this piece and these additional fields."""
        raise NotImplementedError

    def _read(self, text: str, deltas: list[AnswerDelta]) -> list[AnswerMessage]:
        """Return the pieces of the next part of the output."""
        return self._pieces.add(deltas)

    def response(self, generation: Generation) -> BaseModel:
        (choice,) = generation.choices
        pieces = [*self._read(choice.text, choice.deltas), *self._pieces.close()]
        return self._answer(merged(pieces), **self._last(generation, choice))

    def chunk(self, generation: Generation, choice_output: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        _, output, deltas = choice_output
        return b"".join(map(self._line, self._read(output.text, deltas)))

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        (choice,) = generation.choices
        lines = [*map(self._line, self._pieces.close()), self._line(AnswerMessage(), **self._last(generation, choice))]
        return b"".join(lines)

    def error(self, generation: Generation, error: APIError) -> bytes:
        return _encode(OllamaError(error=error.message))

    def _line(self, piece: AnswerMessage, **fields: Any) -> bytes:
        return _encode(self._answer(piece, **fields))

    def _head(self) -> dict[str, Any]:
        return {"model": self.name, "created_at": timestamp(time.time())}

    def _last(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        """Return the fields of the last line: the finish reason, the token counts, and durations in nanoseconds.

        ``prompt_eval_duration`` is the time until the first token, including the time in the queue.
        """
        end = time.monotonic()
        first = generation.first_output_time or end
        usage = generation.usage
        return {
            "done": True,
            "done_reason": choice.finish_reason,
            "total_duration": _nanoseconds(end - self._arrived),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._arrived),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(end - first),
        }


class OllamaChat(OllamaEndpoint, BaseChatEndpoint):
    """Endpoint ``/api/chat``."""

    streams_arguments = False

    def __init__(self, served: ServedModel, name: str) -> None:
        super().__init__(served)
        self._begin(name)

    def _answer(self, piece: AnswerMessage, **fields: Any) -> OllamaAnswer:
        return ChatAnswer(**self._head(), message=piece, **fields)


class OllamaGenerate(OllamaChat):
    """Endpoint ``/api/generate`` with a prompt that the chat template formats."""

    def _answer(self, piece: AnswerMessage, **fields: Any) -> OllamaAnswer:
        return GenerateAnswer(**self._head(), response=piece.content, thinking=piece.thinking, **fields)


class OllamaRaw(OllamaEndpoint, CompletionEndpoint):
    """Endpoint ``/api/generate`` with a raw prompt, or a suffix."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._begin(name)

    def _read(self, text: str, deltas: list[AnswerDelta]) -> list[AnswerMessage]:
        return [AnswerMessage(content=text)] if text else []

    def _answer(self, piece: AnswerMessage, **fields: Any) -> OllamaAnswer:
        return GenerateAnswer(**self._head(), response=piece.content, **fields)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _encode(line: BaseModel) -> bytes:
    # ASCII only: some clients end a line at U+2028, U+0085 and similar characters.
    return line.model_dump_json(ensure_ascii=True).encode("ascii") + b"\n"
