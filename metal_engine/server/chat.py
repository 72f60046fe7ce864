"""``/v1/chat/completions``: what sets it apart from other generating endpoints."""

from __future__ import annotations

from pydantic import BaseModel

from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.request import RequestOutput, TokenLogprobs
from metal_engine.server.conversation import template_kwargs, template_messages
from metal_engine.server.errors import invalid
from metal_engine.server.generation import Generation, finish_reason
from metal_engine.server.logprobs import chat_logprobs
from metal_engine.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionBody,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
    Usage,
)


class ChatEndpoint:
    """Implements :class:`metal_engine.server.generation.Endpoint`."""

    id_prefix = "chatcmpl"

    def tokenize(self, body: ChatCompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
        messages = template_messages(body.messages)
        flags = {**template_kwargs(body, tokenizer), **_template_flags(body)}
        try:
            return [tokenizer.apply_chat_template(messages, **flags)]
        except ValueError as error:
            raise invalid(str(error), param="messages") from error

    def echoes(
        self, body: ChatCompletionBody, prompts: list[list[int]], tokenizer: Tokenizer
    ) -> list[str] | None:
        return None

    def response(self, generation: Generation) -> BaseModel:
        choices = []
        for choice in generation.choices:
            assert choice.finish_reason is not None
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=AssistantMessage(content=choice.text),
                    logprobs=_logprobs(generation, choice.text_logprobs),
                    finish_reason=choice.finish_reason,
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

    def chunks(
        self, generation: Generation, index: int, output: RequestOutput, first: bool
    ) -> list[BaseModel]:
        choices = []
        if first:
            choices.append(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")))
        if output.text or output.text_logprobs:
            choices.append(
                ChatChunkChoice(
                    index=index,
                    delta=Delta(content=output.text),
                    logprobs=_logprobs(generation, output.text_logprobs or []),
                )
            )
        if output.finished:
            choices.append(
                ChatChunkChoice(
                    index=index,
                    delta=Delta(),
                    finish_reason=finish_reason(output),
                    stop_reason=output.stop_reason,
                )
            )
        return [_chunk(generation, [choice]) for choice in choices]

    def usage_chunk(self, generation: Generation) -> BaseModel:
        return _chunk(generation, [], generation.usage)


def _logprobs(generation: Generation, tokens: list[TokenLogprobs]) -> ChatLogprobs | None:
    return None if generation.params.logprobs is None else chat_logprobs(generation.tokenizer, tokens)


def _template_flags(body: ChatCompletionBody) -> dict[str, bool]:
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
