"""State of one response of ``/v1/responses``, and the events that report its changes."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from metal_engine.answers.deltas import AnswerDelta
from metal_engine.json_values import num_characters
from metal_engine.server.errors import APIError
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.input_items import Item
from metal_engine.server.openai.response_items import Event, ResponseItems
from metal_engine.server.openai.responses_protocol import Response, ResponseStatus
from metal_engine.server.usage import Usage

ID_PREFIX = "resp"
_UNFINISHED = ("queued", "in_progress")


@dataclass(frozen=True)
class AskedResponse:
    """Data of a request to ``/v1/responses`` that its converted chat lacks.

    Attributes:
        repeated: request fields that the response repeats.
        items: the conversation, without instructions and without the response's output.
        num_characters: size of ``repeated`` and ``items`` (:func:`metal_engine.json_values.num_characters`).
        namespaces: namespaces of the functions, as :func:`responses_protocol.namespaces` returns them.
        is_streamed: True if the client wants events.
        in_background: True if the response goes on after its client has disconnected.
        is_stored: True if clients can retrieve the response later.
        num_earlier_characters: number of characters of the stored response that the request continues; 0 if it
            continues none.
    """

    repeated: dict[str, Any]
    items: list[Item]
    num_characters: int
    namespaces: dict[str, tuple[str, str]]
    is_streamed: bool = False
    in_background: bool = False
    is_stored: bool = True
    num_earlier_characters: int = 0


class ResponseState:
    """A response from its creation to its end.

    Methods that change the response return the encoded events about the change. For a response that is not streamed,
    they return no bytes.

    Args:
        asked: data of the request.
        model: name of the model, or an empty text until :class:`ResponsesEndpoint` sets it.

    Attributes:
        status: OpenAI's status. A response in the background is ``queued`` until its first output, and any other
            response is ``in_progress`` from its creation.
    """

    def __init__(self, asked: AskedResponse, model: str) -> None:
        self.asked = asked
        self.id = f"{ID_PREFIX}-{uuid.uuid4().hex}"
        self.model = model
        self.status: ResponseStatus = "queued" if asked.in_background else "in_progress"
        self._created = int(time.time())
        self._items = ResponseItems(asked.namespaces)
        self._numbers = itertools.count()
        self._error: dict[str, Any] | None = None
        self._usage: Usage | None = None

    @property
    def is_finished(self) -> bool:
        return self.status not in _UNFINISHED

    @property
    def conversation(self) -> list[Item]:
        """Items of the conversation, including the output so far."""
        return [*self.asked.items, *self._items.items]

    @property
    def num_characters(self) -> int:
        """Size of the response and its conversation (:func:`metal_engine.json_values.num_characters`)."""
        return self.asked.num_characters + num_characters(self._items.items)

    @property
    def response(self) -> Response:
        """The response so far."""
        head: dict[str, Any] = {"id": self.id, "created_at": self._created, "model": self.model}
        response = Response(status=self.status, **self.asked.repeated, **head)
        response.output = self._items.snapshot()
        response.error = self._error
        if self.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        if self._usage is not None:
            response.usage = _usage(self._usage)
        return response

    def create(self) -> bytes:
        """Return the first events: the response was created, and is queued or in progress."""
        return self._encode([self._about("created"), self._about(self.status)])

    def add(self, deltas: list[AnswerDelta], reason: str | None = None) -> bytes:
        """Add output. ``reason`` is the finish reason if this is the last output, otherwise None."""
        events: list[Event] = []
        if self.status == "queued":
            self.status = "in_progress"
            events.append(self._about("in_progress"))
        events += self._items.add(deltas)
        if reason is not None:
            events += self._items.close("completed" if reason == "stop" else "incomplete")
        return self._encode(events)

    def finish(self, reason: str | None, usage: Usage) -> bytes:
        """End the response after its last output, whose finish reason is ``reason``."""
        self.status = "completed" if reason == "stop" else "incomplete"
        self._usage = usage
        return self._encode([self._about(self.status)])

    def fail(self, error: APIError) -> bytes:
        """End the response with an error."""
        events = self._items.close("incomplete")
        self.status = "failed"
        self._error = {
            "code": "invalid_prompt" if error.status_code < 500 else "server_error",
            "message": error.message,
        }
        failure = {"type": "error", "code": error.code or "server_error", "message": error.message, "param": None}
        return self._encode([*events, failure, self._about("failed")])

    def cancel(self) -> bytes:
        """End the response because a client cancelled it.

        OpenAI has no event for that. The last event is ``response.failed``, with a response whose status is
        ``cancelled``.
        """
        events = self._items.close("incomplete")
        self.status = "cancelled"
        return self._encode([*events, self._about("failed")])

    def _about(self, change: str) -> Event:
        return {"type": f"response.{change}", "response": self.response.model_dump()} if self.asked.is_streamed else {}

    def _encode(self, events: Sequence[Event]) -> bytes:
        if not self.asked.is_streamed:
            return b""
        return b"".join(named_sse({**event, "sequence_number": next(self._numbers)}) for event in events)


def _usage(usage: Usage) -> dict[str, Any]:
    details = usage.prompt_tokens_details
    images = {} if details.image_tokens is None else {"image_tokens": details.image_tokens}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": details.cached_tokens, "cache_write_tokens": 0, **images},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": usage.completion_tokens_details.model_dump(),
        "total_tokens": usage.total_tokens,
    }
