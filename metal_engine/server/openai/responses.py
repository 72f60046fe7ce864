"""``/v1/responses``: OpenAI's newer endpoint, with what it remembers of earlier responses."""

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

# What a response tells of its request as it came, or by Response's default.
_TOLD = ResponsesBody.model_fields.keys() & Response.model_fields.keys() - {"model", "text", "tools"}


# What is told again is made JSON in the event loop, three times over: 3 ms each.
MAX_TOLD_CHARACTERS = 1 << 20


# Of a conversation that grows from response to response; each takes a kilobyte.
MAX_MESSAGES = 1 << 14


@dataclass(frozen=True)
class AskedResponse:
    """What a request asks for beside what its chat does.

    Attributes:
        told: what the response tells of its request.
        messages: the conversation, without instructions.
        num_characters: how much text there is in both.
        namespaces: of its functions, as :func:`responses_protocol.namespaces` finds them.
    """

    told: dict[str, Any]
    messages: list[Message]
    num_characters: int
    namespaces: dict[str, tuple[str, str]]


def read_request(body: ResponsesBody, earlier: list[Message]) -> tuple[ChatCompletionBody, AskedResponse]:
    """A request as a chat's, and what else it asks for. Raises as :func:`to_chat` does, and for too much to be told.

    Args:
        earlier: the messages that ``previous_response_id`` stands for.
    """
    told = {name: value for name, value in body.model_dump(include=_TOLD).items() if value is not None}
    told |= {"text": {"format": {"type": "text"}}}
    told |= body.model_dump(include={"text", "tools"}, exclude_none=True)
    instructions = len(body.instructions or "")
    if num_characters(told) - instructions > MAX_TOLD_CHARACTERS:
        limit = f"they may have {MAX_TOLD_CHARACTERS} characters, 64 for each value besides"
        problem = f"tools, text and metadata are part of the answer: {limit}"
        raise invalid(problem, param="tools")
    chat, messages = to_chat(body, earlier)
    if len(messages) > MAX_MESSAGES:
        raise invalid(f" and the responses before it may have {MAX_MESSAGES} messages", where="input")
    size = num_characters(messages) + num_characters(told)
    return chat, AskedResponse(told, messages, size, namespaces(body.tools))


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation up to it, without instructions."""

    response: dict[str, Any]
    messages: list[Message]


class ResponseStore:
    """The latest responses, in memory: the oldest go when there are too many, or too much text in them. Thread-safe."""

    def __init__(self, max_responses: int, max_characters: int = 1 << 26) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse, size: int) -> None:
        """Keep a response of so many characters, and those before it as far as there is room."""
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
        """Raises APIError, a 404, for a response that is not there (any more)."""
        with self._lock:
            found = self._stored.get(response_id)
            if found is not None:
                self._stored.move_to_end(response_id)
                return found[0]
        problem = "it was not stored, or has been dropped for newer ones"
        message = f"there is no response {response_id[:100]!r}: {problem}"
        raise APIError(404, message, param=param, code="response_not_found")

    def messages(self, response_id: str | None) -> list[Message]:
        """The conversation that ``previous_response_id`` stands for. Raises as :meth:`get` does."""
        return [] if response_id is None else self.get(response_id, "previous_response_id").messages

    def num_characters(self, response_id: str) -> int:
        """How much text there is in the conversation that ``previous_response_id`` stands for."""
        with self._lock:
            return self._stored[response_id][1] if response_id in self._stored else 0

    def delete(self, response_id: str) -> None:
        """Raises APIError, a 404, as :meth:`get` does."""
        self.get(response_id)
        with self._lock:
            self._num_characters -= self._stored.pop(response_id, (None, 0))[1]


def responses_error(error: APIError) -> bytes:
    """The event of an error before there is a response."""
    told = {"code": error.code or "server_error", "message": error.message, "param": error.param}
    return named_sse({"type": "error", **told, "sequence_number": 0})


class ResponsesEndpoint(Conversation):
    """Answers are items, which a stream's events tell of as they grow.

    Args:
        asked: what the request asks for beside what its chat does.
    """

    id_prefix = "resp"
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

    def chunk(self, generation: Generation, arrived: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
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
            stored = StoredResponse(response.model_dump(), [*self._asked.messages, answer])
            self._store.put(stored, self._asked.num_characters + num_characters([answer, response.output]))
        return response

    def _response(self, generation: Generation, status: Any) -> Response:
        told: dict[str, Any] = {
            "id": generation.request_id,
            "created_at": generation.created,
            "model": generation.model,
        }
        return Response(status=status, **self._asked.told, **told)
