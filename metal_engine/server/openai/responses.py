"""Endpoint class of ``/v1/responses``, OpenAI's newer API."""

from __future__ import annotations

from pydantic import BaseModel

from metal_engine.json_values import num_characters
from metal_engine.server.errors import APIError, invalid
from metal_engine.server.generation.generation import ChoiceOutput, Generation, finish_reason
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.base_chat_endpoint import BaseChatEndpoint
from metal_engine.server.openai.input_items import Item
from metal_engine.server.openai.response_state import ID_PREFIX, AskedResponse, ResponseState
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.server.openai.responses_protocol import Response, ResponsesBody, namespaces, to_chat
from metal_engine.server.protocol import ChatCompletionBody
from metal_engine.server.usage import Usage

# Request fields that the response repeats, as received or with the default of Response.
_REPEATED = ResponsesBody.model_fields.keys() & Response.model_fields.keys() - {"model", "text", "tools"}


# Maximum size of the repeated fields in characters, without the instructions. The event loop encodes the fields three
# times, in 3 ms each.
MAX_REPEATED_CHARACTERS = 1 << 20


# Maximum number of items in a conversation that grows over several responses. Each item takes 1 kB.
MAX_ITEMS = 1 << 14


def read_request(
    body: ResponsesBody, earlier: list[Item], num_earlier_characters: int
) -> tuple[ChatCompletionBody, AskedResponse]:
    """Convert a request to a chat, and to the :class:`AskedResponse` with the other data of the request.

    Args:
        earlier: items of the conversation up to ``previous_response_id``, including that response.
        num_earlier_characters: number of characters of the response with the id ``previous_response_id``.

    Raises:
        APIError: status 400. :func:`to_chat` failed, the fields that the response repeats are too large, or the
            conversation has too many items.
    """
    repeated = {name: value for name, value in body.model_dump(include=_REPEATED).items() if value is not None}
    repeated |= body.model_dump(include={"text", "tools"}, exclude_none=True)
    repeated["text"] = {"format": {"type": "text"}, **repeated.get("text", {})}
    instructions = len(body.instructions or "")
    if num_characters(repeated) - instructions > MAX_REPEATED_CHARACTERS:
        limit = f"the limit is {MAX_REPEATED_CHARACTERS} characters, plus 64 for each value"
        problem = f"tools, text and metadata are repeated in the response: {limit}"
        raise invalid(problem, param="tools")
    chat, items = to_chat(body, earlier)
    if len(items) > MAX_ITEMS:
        problem = f" and the responses before it have too many items; the limit is {MAX_ITEMS}"
        raise invalid(problem, where="input")
    asked = AskedResponse(
        repeated,
        items,
        num_characters(items) + num_characters(repeated),
        namespaces(body.tools),
        is_streamed=bool(body.stream),
        in_background=bool(body.background),
        is_stored=body.store is not False,
        num_earlier_characters=num_earlier_characters,
    )
    return chat, asked


def responses_error(error: APIError) -> bytes:
    """Return the only event of a stream whose request failed before the response was created."""
    fields = {"code": error.code or "server_error", "message": error.message, "param": error.param}
    return named_sse({"type": "error", **fields, "sequence_number": 0})


class ResponsesEndpoint(BaseChatEndpoint):
    """Endpoint ``/v1/responses``. A response has output items. The events of a stream report each item's growth.

    Args:
        store: store for the finished response. A response in the background is in the store already.
        state: state of the response. Its model becomes the name of ``served``.
    """

    id_prefix = ID_PREFIX
    schema_place = "parameters"
    has_choices = False

    def __init__(self, served: ServedModel, store: ResponseStore, state: ResponseState) -> None:
        super().__init__(served)
        self._store = store
        self._state = state
        self.num_earlier_characters = state.asked.num_earlier_characters
        state.model = served.names[0]

    def response(self, generation: Generation) -> BaseModel:
        (choice,) = generation.choices
        self._state.add(choice.deltas, choice.finish_reason)
        self._finish(generation)
        return self._state.response

    def begin(self, generation: Generation) -> bytes:
        return b"" if self._state.asked.in_background else self._state.create()

    def chunk(self, generation: Generation, choice_output: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        _, output, deltas = choice_output
        return self._state.add(deltas, finish_reason(output))

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        return self._finish(generation)

    def error(self, generation: Generation, error: APIError) -> bytes:
        return self._state.fail(error)

    def _finish(self, generation: Generation) -> bytes:
        (choice,) = generation.choices
        events = self._state.finish(choice.finish_reason, generation.usage)
        asked = self._state.asked
        if asked.is_stored and not asked.in_background:
            self._store.put(self._state)
        return events
