"""``/v1/responses``: OpenAI's newer endpoint, with what it remembers of earlier responses."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from metal_engine.answers.deltas import AnswerDelta
from metal_engine.server.errors import APIError
from metal_engine.server.generation.generation import Arrived, Generation, finish_reason
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.conversation import Conversation, message_of
from metal_engine.server.openai.response_items import Event, ResponseItems
from metal_engine.server.openai.responses_protocol import Message, Response, ResponsesBody
from metal_engine.server.protocol import Usage

# What a response tells of its request as it came, or by Response's default.
_TOLD = ResponsesBody.model_fields.keys() & Response.model_fields.keys() - {"model", "text", "tools"}


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation up to it, without instructions."""

    response: dict[str, Any]
    messages: list[Message]


class ResponseStore:
    """The latest responses, in memory: the oldest go when there are too many, or too much text in them."""

    def __init__(self, max_responses: int, max_characters: int = 1 << 26) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_characters = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        size = len(repr(stored.messages)) + len(repr(stored.response))
        self._stored[stored.response["id"]] = stored, size
        self._num_characters += size
        while self._stored and (len(self._stored) > self._max_responses or self._num_characters > self._max_characters):
            _, (_, gone) = self._stored.popitem(last=False)
            self._num_characters -= gone

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises APIError, a 404, for a response that is not there (any more)."""
        if response_id not in self._stored:
            problem = "it was not stored, or has been dropped for newer ones"
            message = f"there is no response {response_id[:100]!r}: {problem}"
            raise APIError(404, message, param=param, code="response_not_found")
        self._stored.move_to_end(response_id)
        return self._stored[response_id][0]

    def messages(self, response_id: str | None) -> list[Message]:
        """The conversation that ``previous_response_id`` stands for. Raises as :meth:`get` does."""
        return [] if response_id is None else self.get(response_id, "previous_response_id").messages

    def delete(self, response_id: str) -> None:
        """Raises APIError, a 404, as :meth:`get` does."""
        self.get(response_id)
        self._num_characters -= self._stored.pop(response_id)[1]


class ResponsesEndpoint(Conversation):
    """Answers are items, which a stream's events tell of as they grow.

    Args:
        body: as it came.
        messages: the conversation, without instructions.
    """

    id_prefix = "resp"

    def __init__(self, served: ServedModel, store: ResponseStore, body: ResponsesBody, messages: list[Message]) -> None:
        super().__init__(served)
        self._body = body
        self._store = store
        self._messages = messages
        self._items = ResponseItems()
        self._deltas: list[AnswerDelta] = []
        self._numbers = itertools.count()

    def response(self, generation: Generation) -> BaseModel:
        (choice,) = generation.choices
        self._take(choice.deltas, choice.finish_reason)
        return self._finished(generation, choice.finish_reason)

    def begin(self, generation: Generation) -> bytes:
        response = self._response(generation, "in_progress").model_dump()
        events = [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]
        return self._numbered(events)

    def chunk(self, generation: Generation, arrived: Arrived, first: bool, usage: Usage | None) -> bytes:
        _, output, deltas = arrived
        return self._numbered(self._take(deltas, finish_reason(output)))

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        (choice,) = generation.choices
        response = self._finished(generation, choice.finish_reason)
        return self._numbered([{"type": f"response.{response.status}", "response": response.model_dump()}])

    def error(self, generation: Generation, error: APIError) -> bytes:
        response = self._response(generation, "failed")
        response.error = {"code": "server_error", "message": error.message}
        events = self._items.close("incomplete")
        response.output = self._items.items
        failure = {"type": "error", "code": error.code or "server_error", "message": error.message, "param": None}
        failed = {"type": "response.failed", "response": response.model_dump()}
        return self._numbered([*events, failure, failed])

    def _take(self, deltas: list[AnswerDelta], reason: str | None) -> list[Event]:
        self._deltas += deltas
        events = self._items.add(deltas)
        if reason is not None:
            events += self._items.close("completed" if reason == "stop" else "incomplete")
        return events

    def _numbered(self, events: list[Event]) -> bytes:
        return b"".join(named_sse({**event, "sequence_number": next(self._numbers)}) for event in events)

    def _finished(self, generation: Generation, reason: str | None) -> Response:
        complete = reason == "stop"
        response = self._response(generation, "completed" if complete else "incomplete")
        if not complete:
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.output = self._items.items
        usage = generation.usage
        response.usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details.model_dump(),
            "total_tokens": usage.total_tokens,
        }
        if response.store:
            answer = message_of(self._deltas).model_dump(exclude_none=True)
            self._store.put(StoredResponse(response.model_dump(), [*self._messages, answer]))
        return response

    def _response(self, generation: Generation, status: Any) -> Response:
        told = {name: value for name, value in self._body.model_dump(include=_TOLD).items() if value is not None}
        told |= {"text": {"format": {"type": "text"}}}
        told |= self._body.model_dump(include={"text", "tools"}, exclude_none=True)
        told |= {"id": generation.request_id, "created_at": generation.created, "model": generation.model}
        return Response(status=status, **told)
