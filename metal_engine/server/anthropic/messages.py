"""Endpoint class of Anthropic's ``/v1/messages``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from metal_engine.answers.deltas import AnswerDelta, ArgumentsDelta, CallStart, TextDelta, assemble
from metal_engine.server.anthropic.protocol import AnthropicOutputTokens, AnthropicResponse, AnthropicUsage
from metal_engine.server.errors import APIError, anthropic_error
from metal_engine.server.generation.generation import Choice, ChoiceOutput, Generation
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.base_chat_endpoint import BaseChatEndpoint
from metal_engine.server.usage import Usage

Event = dict[str, Any]


def _input(arguments: str) -> dict[str, Any]:
    """Parse the JSON arguments of a call to an object, the ``input`` of a ``tool_use`` block.

    Incomplete JSON is parsed as far as possible, as the official client does in a stream. Text that is not a JSON
    object becomes an empty object.
    """
    try:
        given = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


class MessagesEndpoint(BaseChatEndpoint):
    """Endpoint ``/v1/messages``. A response has content blocks. The events of a stream report each block's growth."""

    id_prefix = "msg"
    schema_place = "input_schema"
    has_choices = False

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served)
        self._open: str | None = None  # kind of the last block; None after it ended
        self._num_blocks = 0

    def response(self, generation: Generation) -> BaseModel:
        (choice,) = generation.choices
        answer = assemble(choice.deltas)
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        for call in answer.tool_calls:
            given = _input(call.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return AnthropicResponse(
            id=generation.request_id, model=generation.model, content=content, usage=_usage(generation), **_stop(choice)
        )

    def begin(self, generation: Generation) -> bytes:
        usage = AnthropicUsage(input_tokens=generation.num_prompt_tokens, output_tokens=0)
        message = AnthropicResponse(id=generation.request_id, model=generation.model, content=[], usage=usage)
        return _encode([{"type": "message_start", "message": message.model_dump()}, {"type": "ping"}])

    def chunk(self, generation: Generation, choice_output: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        events: list[Event] = []
        for delta in choice_output[2]:
            kind = delta.kind if isinstance(delta, TextDelta) else "call"
            if isinstance(delta, CallStart) or kind != self._open:
                events += self._close()
                self._open = kind
                self._num_blocks += 1
                events.append(self._event("content_block_start", content_block=_block(delta)))
            if not isinstance(delta, CallStart):
                events.append(self._event("content_block_delta", delta=_delta(delta)))
        return _encode(events)

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        (choice,) = generation.choices
        events = self._close()
        events.append({"type": "message_delta", "delta": _stop(choice), "usage": _usage(generation).model_dump()})
        return _encode([*events, {"type": "message_stop"}])

    def error(self, generation: Generation, error: APIError) -> bytes:
        return named_sse(anthropic_error(error))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": self._num_blocks - 1, **fields}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [self._event("content_block_stop")]


def _block(delta: AnswerDelta) -> dict[str, Any]:
    """Return an empty content block of the kind that ``delta`` needs. The event ``content_block_start`` contains it."""
    if isinstance(delta, CallStart):
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    if isinstance(delta, TextDelta) and delta.kind == "content":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _stop(choice: Choice) -> dict[str, Any]:
    """Return the fields ``stop_reason`` and ``stop_sequence`` for a choice."""
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if choice.num_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _delta(delta: AnswerDelta) -> dict[str, Any]:
    if isinstance(delta, ArgumentsDelta):
        return {"type": "input_json_delta", "partial_json": delta.text}
    assert isinstance(delta, TextDelta)
    if delta.kind == "content":
        return {"type": "text_delta", "text": delta.text}
    return {"type": "thinking_delta", "thinking": delta.text}


def _usage(generation: Generation) -> AnthropicUsage:
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
        output_tokens_details=AnthropicOutputTokens(thinking_tokens=usage.completion_tokens_details.reasoning_tokens),
    )


def _encode(events: list[Event]) -> bytes:
    return b"".join(map(named_sse, events))
