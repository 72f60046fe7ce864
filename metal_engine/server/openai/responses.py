"""Endpoint class of ``/v1/responses``, OpenAI's newer API, and the store of earlier responses."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from metal_engine.answers.deltas import AnswerDelta
from metal_engine.server.errors import APIError, invalid
from metal_engine.server.generation.generation import ChoiceOutput, Generation, finish_reason
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.conversation import Conversation, message_of
from metal_engine.server.openai.response_items import Event, ResponseItems
from metal_engine.server.openai.responses_protocol import Message, Response, ResponsesBody, namespaces, to_chat
from metal_engine.server.protocol import ChatCompletionBody
from metal_engine.server.usage import Usage
from metal_engine.sizes import num_characters

# Request fields that the response repeats, as received or with the default of Response.
_REPEATED = ResponsesBody.model_fields.keys() & Response.model_fields.keys() - {"model", "text", "tools"}


# Maximum size of the repeated fields in characters. The event loop encodes them three times, in 3 ms each.
MAX_REPEATED_CHARACTERS = 1 << 20


# Maximum number of messages in a conversation that grows over several responses. Each message takes 1 kB.
MAX_MESSAGES = 1 << 14


@dataclass(frozen=True)
class AskedResponse:
    """Additional data of a request to ``/v1/responses``, beside its chat.

    Attributes:
        repeated: request fields that the response repeats.
        messages: the conversation, without instructions.
        num_characters: number of characters in ``repeated`` and ``messages``.
        namespaces: namespaces of the functions, as :func:`responses_protocol.namespaces` returns them.
    """

    repeated: dict[str, Any]
    messages: list[Message]
    num_characters: int
    namespaces: dict[str, tuple[str, str]]


def read_request(body: ResponsesBody, earlier: list[Message]) -> tuple[ChatCompletionBody, AskedResponse]:
    """Convert a request to a chat and its additional data.

    Args:
        earlier: messages of the conversation up to ``previous_response_id``, including that response.

    Raises:
        APIError: :func:`to_chat` failed, or the fields to repeat or the conversation are too large.
    """
    repeated = {name: value for name, value in body.model_dump(include=_REPEATED).items() if value is not None}
    repeated |= {"text": {"format": {"type": "text"}}}
    repeated |= body.model_dump(include={"text", "tools"}, exclude_none=True)
    instructions = len(body.instructions or "")
    if num_characters(repeated) - instructions > MAX_REPEATED_CHARACTERS:
        limit = f"the limit is {MAX_REPEATED_CHARACTERS} characters, plus 64 for each value"
        problem = f"tools, text and metadata are repeated in the response: {limit}"
        raise invalid(problem, param="tools")
    chat, messages = to_chat(body, earlier)
    if len(messages) > MAX_MESSAGES:
        problem = f" and the responses before it have too many messages; the limit is {MAX_MESSAGES}"
        raise invalid(problem, where="input")
    size = num_characters(messages) + num_characters(repeated)
    return chat, AskedResponse(repeated, messages, size, namespaces(body.tools))


@dataclass(frozen=True)
class StoredResponse:
    """A response and its conversation, without instructions."""

    response: dict[str, Any]
    messages: list[Message]


class ResponseStore:
    """Recent responses, in memory. Thread-safe.

    If there are too many responses or characters, the least recently used responses are dropped.

    Args:
        max_responses: maximum number of responses.
        max_characters: maximum number of characters of all responses and their conversations.
    """

    def __init__(self, max_responses: int, max_characters: int = 1 << 26) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse, size: int) -> None:
        """Store a response with ``size`` characters. Drop the least recently used responses if necessary."""
        with self._lock:
            self._stored[stored.response["id"]] = stored, size
            self._num_characters += size
            while self._stored and self._is_overfull:
                _, (_, gone) = self._stored.popitem(last=False)
                self._num_characters -= gone

    @property
    def _is_overfull(self) -> bool:
        return len(self._stored) > self._max_responses or self._num_characters > self._max_characters

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises APIError, a 404, for an unknown or dropped response."""
        with self._lock:
            found = self._stored.get(response_id)
            if found is not None:
                self._stored.move_to_end(response_id)
                return found[0]
        problem = "it was not stored, or was replaced by newer responses"
        message = f"there is no response {response_id[:100]!r}: {problem}"
        raise APIError(404, message, param=param, code="response_not_found")

    def messages(self, response_id: str | None) -> list[Message]:
        """Return the conversation up to ``previous_response_id``. Raises as :meth:`get`."""
        return [] if response_id is None else self.get(response_id, "previous_response_id").messages

    def num_characters(self, response_id: str) -> int:
        """Return the number of characters in the conversation up to ``previous_response_id``."""
        with self._lock:
            return self._stored[response_id][1] if response_id in self._stored else 0

    def delete(self, response_id: str) -> None:
        """Delete a stored response. Raises as :meth:`get`."""
        self.get(response_id)
        with self._lock:
            self._num_characters -= self._stored.pop(response_id, (None, 0))[1]


def responses_error(error: APIError) -> bytes:
    """Return the event for an error that occurs before the response is created."""
    fields = {"code": error.code or "server_error", "message": error.message, "param": error.param}
    return named_sse({"type": "error", **fields, "sequence_number": 0})


class ResponsesEndpoint(Conversation):
    """Responds with output items. The events of a stream report how each item grows.

    Args:
        asked: additional data of the request, beside its chat.
    """

    id_prefix = "resp"
    schema_place = "parameters"
    has_choices = False

    def __init__(self, served: ServedModel, store: ResponseStore, asked: AskedResponse) -> None:
        super().__init__(served)
        self._store = store
        self._asked = asked
        self._items = ResponseItems(asked.namespaces)
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

    def chunk(self, generation: Generation, choice_output: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        _, output, deltas = choice_output
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
            stored = StoredResponse(response.model_dump(), [*self._asked.messages, answer])
            self._store.put(stored, self._asked.num_characters + num_characters([answer, response.output]))
        return response

    def _response(self, generation: Generation, status: Any) -> Response:
        head: dict[str, Any] = {
            "id": generation.request_id,
            "created_at": generation.created,
            "model": generation.model,
        }
        return Response(status=status, **self._asked.repeated, **head)
