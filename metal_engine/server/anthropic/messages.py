"""Anthropic's ``/v1/messages``: what sets it apart from other generating endpoints."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from metal_engine.answers.pieces import CallArguments, CallStart, Piece, TextPiece
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.server.anthropic.protocol import AnthropicOutputTokens, AnthropicResponse, AnthropicUsage
from metal_engine.server.errors import APIError, anthropic_error
from metal_engine.server.generation.generation import Generation, finish_reason
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.generation.usage import ReasoningCounter
from metal_engine.server.openai.chat import Conversation, message_of
from metal_engine.server.openai.protocol import ChatCompletionBody, Usage

Event = dict[str, Any]


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; as far as they came if they were cut off, as the official client reads a stream's."""
    return from_json(arguments, allow_partial=True) if arguments.strip() else {}


class MessagesEndpoint:
    """Implements :class:`metal_engine.server.generation.preparation.Endpoint` for one request."""

    id_prefix = "msg"

    def __init__(self, served: ServedModel) -> None:
        self._conversation = Conversation(served.parsers)
        self._open: str | None = None  # kind of the last block, while more of it may come
        self._num_blocks = 0

    def tokenize(self, body: ChatCompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
        return [self._conversation.prompt(body, tokenizer)]

    def adjust(self, params: SamplingParams) -> SamplingParams:
        return self._conversation.adjust(params)

    def reasoning_counter(self, tokenizer: Tokenizer) -> ReasoningCounter | None:
        return self._conversation.reasoning_counter(tokenizer)

    def echoes(
        self, body: ChatCompletionBody, prompts: list[list[int]], tokenizer: Tokenizer
    ) -> list[str] | None:
        return None

    def response(self, generation: Generation) -> BaseModel:
        (choice,) = generation.choices
        assert choice.finish_reason is not None
        message = message_of(self._conversation.pieces(0, choice.text, choice.finish_reason))
        content: list[dict[str, Any]] = []
        if message.reasoning:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.tool_calls or []:
            given = _input(call.function.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": given})
        return AnthropicResponse(
            id=generation.request_id,
            model=generation.model,
            content=content,
            usage=_usage(generation),
            **self._stop(choice.finish_reason, choice.stop_reason),
        )

    def begin(self, generation: Generation) -> bytes:
        usage = AnthropicUsage(input_tokens=generation.num_prompt_tokens, output_tokens=0)
        message = AnthropicResponse(id=generation.request_id, model=generation.model, content=[], usage=usage)
        return _encode([{"type": "message_start", "message": message.model_dump()}, {"type": "ping"}])

    def chunk(
        self, generation: Generation, index: int, output: RequestOutput, first: bool, usage: Usage | None
    ) -> bytes:
        events: list[Event] = []
        for piece in self._conversation.pieces(index, output.text, finish_reason(output)):
            kind = piece.kind if isinstance(piece, TextPiece) else "call"
            if isinstance(piece, CallStart) or kind != self._open:
                events += self._close()
                events += self._begin(piece)
                self._open = kind
            if not isinstance(piece, CallStart):
                at = self._num_blocks - 1
                events.append({"type": "content_block_delta", "index": at, "delta": _delta(piece)})
        return _encode(events)

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        (choice,) = generation.choices
        assert choice.finish_reason is not None
        events = self._close()
        events.append(
            {
                "type": "message_delta",
                "delta": self._stop(choice.finish_reason, choice.stop_reason),
                "usage": _usage(generation).model_dump(),
            }
        )
        return _encode([*events, {"type": "message_stop"}])

    def error(self, generation: Generation, error: APIError) -> bytes:
        return named_sse(anthropic_error(error))

    def _begin(self, piece: Piece) -> list[Event]:
        block: dict[str, Any]
        if isinstance(piece, CallStart):
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
        elif isinstance(piece, TextPiece) and piece.kind == "content":
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self._num_blocks += 1
        return [{"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _stop(self, reason: Any, stop: str | int | None) -> dict[str, Any]:
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._conversation.has_called(0):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, CallArguments):
        return {"type": "input_json_delta", "partial_json": piece.text}
    assert isinstance(piece, TextPiece)
    if piece.kind == "content":
        return {"type": "text_delta", "text": piece.text}
    return {"type": "thinking_delta", "thinking": piece.text}


def _usage(generation: Generation) -> AnthropicUsage:
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
        output_tokens_details=AnthropicOutputTokens(
            thinking_tokens=usage.completion_tokens_details.reasoning_tokens
        ),
    )


def _encode(events: list[Event]) -> bytes:
    return b"".join(map(named_sse, events))
