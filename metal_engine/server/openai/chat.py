"""``/v1/chat/completions``: what sets it apart from other generating endpoints."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from metal_engine.answers.formats import Parsers, begins_in_reasoning
from metal_engine.answers.pieces import CallStart, Piece, Splitter, TextPiece
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.request import RequestOutput, TokenLogprobs
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.server.errors import APIError, invalid, invalid_prompt
from metal_engine.server.generation.generation import Generation, finish_reason
from metal_engine.server.generation.streaming import DONE, ChunkTemplate, sse
from metal_engine.server.generation.usage import ReasoningCounter
from metal_engine.server.openai.logprobs import chat_logprobs
from metal_engine.server.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionBody,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprobs,
    Delta,
    FunctionCall,
    ToolCall,
    Usage,
)
from metal_engine.server.openai.template_messages import template_kwargs, template_messages
from metal_engine.server.openai.tools import NO_TOOLS, plan_tools

# Tokens at the end of a prompt that tell whether its template has begun the reasoning.
_PROMPT_END_TOKENS = 64


class Conversation:
    """One chat request, from messages to pieces: what all endpoints that chat share.

    Belongs to one request; :meth:`prompt` comes first.
    """

    def __init__(self, parsers: Parsers) -> None:
        self._parsers = parsers
        self._plan = NO_TOOLS
        self._in_reasoning = False
        self._splitters: dict[int, Splitter] = {}
        self._streams = False

    def prompt(self, body: ChatCompletionBody, tokenizer: Tokenizer) -> list[int]:
        """The prompt's token ids. Raises APIError for a body that cannot be a prompt."""
        self._plan = plan_tools(body, self._parsers, tokenizer)
        self._streams = bool(body.stream)
        flags = {**template_kwargs(body, tokenizer), **_template_flags(body)}
        if self._plan.shown:
            flags["tools"] = self._plan.shown
        try:
            messages = template_messages(body.messages, self._plan.instructions)
            prompt = tokenizer.apply_chat_template(messages, **flags)
        except ValueError as error:
            raise invalid_prompt(error, "messages") from error
        if self._parsers.reasoning is not None:
            self._in_reasoning = begins_in_reasoning(
                self._parsers.reasoning,
                tokenizer.decode(prompt[-_PROMPT_END_TOKENS:]),
                continues=bool(body.continue_final_message),
            )
        return prompt

    def adjust(self, params: SamplingParams) -> SamplingParams:
        """The parameters as they are to be used, once the prompt is known."""
        if self._plan.forced:
            # What the client wants content to be does not matter: there is none.
            return params.changed(structured_outputs=StructuredOutputsParams(json=self._plan.schema))
        if self._parsers.special and (self._plan.parsed or self._parsers.reasoning is not None):
            return params.changed(skip_special_tokens=False)
        return params

    def pieces(self, index: int, text: str, reason: str | None) -> list[Piece]:
        """What more text of a choice has come to; ``reason`` says why it is the last, if it is."""
        splitter = self._splitters.get(index)
        if splitter is None:
            splitter = self._plan.splitter(
                self._parsers, in_reasoning=self._in_reasoning, incremental=self._streams
            )
            self._splitters[index] = splitter
        pieces = splitter.add(text)
        if reason is not None:
            pieces += splitter.finish(truncated=reason == "length")
        return pieces

    def reasoning_counter(self, tokenizer: Tokenizer) -> ReasoningCounter | None:
        """Counts a choice's tokens of reasoning; None where there is none. After :meth:`prompt`."""
        if self._plan.forced or self._parsers.reasoning is None:
            return None
        splitter = NO_TOOLS.splitter(self._parsers, in_reasoning=self._in_reasoning, incremental=False)
        return ReasoningCounter(splitter, tokenizer)

    def has_called(self, index: int) -> bool:
        """Whether there was a tool call in a choice."""
        return self._splitters[index].num_calls > 0

    def finish_reason(self, index: int, reason: ChatFinishReason) -> ChatFinishReason:
        """Why a choice ended: for its calls, unless the client named the one call or the text was cut off."""
        is_call = reason == "stop" and self.has_called(index) and self._plan.name is None
        return "tool_calls" if is_call else reason


class ChatEndpoint:
    """Implements :class:`metal_engine.server.generation.preparation.Endpoint` for one request."""

    id_prefix = "chatcmpl"

    def __init__(self, parsers: Parsers) -> None:
        self._conversation = Conversation(parsers)
        self._templates: dict[int, ChunkTemplate] = {}

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
        choices = []
        for choice in generation.choices:
            assert choice.finish_reason is not None
            pieces = self._conversation.pieces(choice.index, choice.text, choice.finish_reason)
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=message_of(pieces),
                    logprobs=_logprobs(generation, choice.text_logprobs),
                    finish_reason=self._conversation.finish_reason(choice.index, choice.finish_reason),
                    stop_reason=choice.stop_reason,
                )
            )
        return ChatCompletion(
            id=generation.request_id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=generation.usage,
            prompt_logprobs=generation.prompt_logprobs(generation.choices[0]),
        )

    def begin(self, generation: Generation) -> bytes:
        return b""

    def chunk(
        self, generation: Generation, index: int, output: RequestOutput, first: bool, usage: Usage | None
    ) -> bytes:
        reason = finish_reason(output)
        pieces = self._conversation.pieces(index, output.text, reason)
        if not (first or reason is not None or usage is not None or output.text_logprobs):
            return b"".join(self._plain(generation, index, piece) for piece in pieces)
        deltas: list[Delta] = [{"role": "assistant", "content": ""}] if first else []
        deltas += [_delta(piece) for piece in pieces]
        if output.text_logprobs and not pieces:  # tokens without text of their own
            deltas.append({"content": ""})
        choices = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        if output.text_logprobs:
            choices[-1].logprobs = _logprobs(generation, output.text_logprobs)
        if reason is not None:
            choices.append(
                ChatChunkChoice(
                    index=index,
                    delta=Delta(),
                    finish_reason=self._conversation.finish_reason(index, reason),
                    stop_reason=output.stop_reason,
                )
            )
        return b"".join(sse(_chunk(generation, [choice], usage)) for choice in choices)

    def _plain(self, generation: Generation, index: int, piece: Piece) -> bytes:
        """The event of a piece and nothing else: what most tokens come to."""
        if isinstance(piece, TextPiece) and piece.kind == "content":
            return self._template(generation, index).fill(piece.text)
        return sse(_chunk(generation, [ChatChunkChoice(index=index, delta=_delta(piece))]))

    def _template(self, generation: Generation, index: int) -> ChunkTemplate:
        template = self._templates.get(index)
        if template is None:
            choice = ChatChunkChoice(index=index, delta=Delta(content=ChunkTemplate.TEXT))
            template = self._templates[index] = ChunkTemplate(_chunk(generation, [choice]))
        return template

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        return (sse(_chunk(generation, [], generation.usage)) if include_usage else b"") + DONE

    def error(self, generation: Generation, error: APIError) -> bytes:
        return sse(error.body)


def _logprobs(generation: Generation, tokens: list[TokenLogprobs]) -> ChatLogprobs | None:
    return None if generation.params.logprobs is None else chat_logprobs(generation.tokenizer, tokens)


def message_of(pieces: list[Piece]) -> AssistantMessage:
    """A whole answer's pieces as a message."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    names: list[tuple[str, str]] = []
    arguments: list[str] = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            texts[piece.kind].append(piece.text)
        elif isinstance(piece, CallStart):
            names.append((piece.id, piece.name))
            arguments.append("")
        else:
            arguments[piece.index] += piece.text
    calls = [
        ToolCall(id=call_id, function=FunctionCall(name=name, arguments=text))
        for (call_id, name), text in zip(names, arguments, strict=True)
    ]
    content = "".join(texts["content"])
    reasoning = "".join(texts["reasoning"]) or None
    return AssistantMessage(
        content=None if calls and not content else content,
        tool_calls=calls or None,
        reasoning=reasoning,
        reasoning_content=reasoning,
    )


def _delta(piece: Piece) -> Delta:
    if isinstance(piece, TextPiece):
        if piece.kind == "content":
            return {"content": piece.text}
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    if isinstance(piece, CallStart):
        function = {"name": piece.name, "arguments": ""}
        return {
            "tool_calls": [
                {"index": piece.index, "id": piece.id, "type": "function", "function": function}  # type: ignore[typeddict-item]
            ]
        }
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _template_flags(body: ChatCompletionBody) -> dict[str, Any]:
    """How the prompt ends: where the assistant begins (the default), or within its last message (a prefill)."""
    if not body.continue_final_message:
        return {"add_generation_prompt": body.add_generation_prompt is not False}
    if body.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if body.messages[-1].role != "assistant":
        raise invalid(
            "continue_final_message needs a last message of the role assistant",
            param="continue_final_message",
        )
    return {"add_generation_prompt": False, "continue_final_message": True}


def _chunk(
    generation: Generation, choices: list[ChatChunkChoice], usage: Usage | None = None
) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=generation.request_id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=usage,
    )
