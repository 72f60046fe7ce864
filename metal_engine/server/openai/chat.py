"""Endpoint class of ``/v1/chat/completions``."""

from __future__ import annotations

from pydantic import BaseModel

from metal_engine.answers.deltas import AnswerDelta, CallStart, TextDelta
from metal_engine.request import TokenLogprobs
from metal_engine.server.errors import invalid_prompt
from metal_engine.server.generation.generation import Choice, ChoiceOutput, Generation, finish_reason
from metal_engine.server.generation.logprobs import chat_logprobs, chat_logprobs_json
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.streaming import DONE, ChunkTemplate, sse
from metal_engine.server.json_parts import Placeholder
from metal_engine.server.openai.base_chat_endpoint import BaseChatEndpoint, message_of
from metal_engine.server.protocol import ChatCompletionBody
from metal_engine.server.response_bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
    FunctionCallDelta,
)
from metal_engine.server.usage import Usage
from metal_engine.text.tokenizer import Tokenizer


class ChatEndpoint(BaseChatEndpoint):
    """Endpoint ``/v1/chat/completions``. A choice is a message. Each chunk of a stream adds to a message."""

    id_prefix = "chatcmpl"

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served)
        self._templates: dict[int, ChunkTemplate] = {}

    def predicted(self, body: ChatCompletionBody, tokenizer: Tokenizer) -> list[int]:
        if body.prediction is None:
            return []
        content = body.prediction.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        except ValueError as error:
            raise invalid_prompt(error, "prediction") from error

    def response(self, generation: Generation) -> BaseModel:
        choices = []
        for choice in generation.choices:
            assert choice.finish_reason is not None
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=message_of(choice.deltas),
                    logprobs=self._all_logprobs(generation, choice),
                    finish_reason=self.chat_finish_reason(choice.num_calls, choice.finish_reason),
                    stop_reason=choice.stop_reason,
                    token_ids=generation.token_ids(choice.token_ids),
                )
            )
        return ChatCompletion(
            **generation.head,
            choices=choices,
            usage=generation.usage,
            prompt_logprobs=generation.prompt_logprobs(generation.choices[0]),
            prompt_token_ids=generation.token_ids(generation.choices[0].prompt_token_ids),
            kv_transfer_params=generation.kv_handover,
        )

    @staticmethod
    def _all_logprobs(generation: Generation, choice: Choice) -> Placeholder | None:
        if generation.params.logprobs is None:
            return None
        json = chat_logprobs_json(generation.tokenizer, choice.text_logprobs, spells_ids=generation.spells_ids)
        return generation.parts.add(json)

    def chunk(self, generation: Generation, choice_output: ChoiceOutput, first: bool, usage: Usage | None) -> bytes:
        index, output, deltas = choice_output
        reason = finish_reason(output)
        shows_ids = generation.shows_token_ids
        if not (first or reason is not None or usage is not None or output.text_logprobs or shows_ids):
            return b"".join(self._plain(generation, index, delta) for delta in deltas)
        encoded: list[Delta] = [{"role": "assistant", "content": ""}] if first else []
        encoded += [_delta(delta) for delta in deltas]
        if output.text_logprobs and not deltas:  # tokens without text of their own
            encoded.append({"content": ""})
        elif output.token_ids and shows_ids and not deltas:
            encoded.append({})
        choices = [ChatChunkChoice(index=index, delta=delta) for delta in encoded]
        if output.text_logprobs:
            choices[-1].logprobs = _logprobs(generation, output.text_logprobs)
        if output.token_ids and shows_ids:
            choices[-1].token_ids = output.token_ids
        if reason is not None:
            chat_reason = self.chat_finish_reason(generation.choices[index].num_calls, reason)
            last = ChatChunkChoice(index=index, delta={}, finish_reason=chat_reason, stop_reason=output.stop_reason)
            choices.append(last)
        chunks = [_chunk(generation, [choice], usage) for choice in choices]
        if first and shows_ids:
            chunks[0].prompt_token_ids = generation.choices[index].prompt_token_ids
        return b"".join(map(sse, chunks))

    def _plain(self, generation: Generation, index: int, delta: AnswerDelta) -> bytes:
        """Encode one delta without role, usage or log probabilities: the common case."""
        if isinstance(delta, TextDelta) and delta.kind == "content":
            return self._template(generation, index).fill(delta.text)
        return sse(_chunk(generation, [ChatChunkChoice(index=index, delta=_delta(delta))]))

    def _template(self, generation: Generation, index: int) -> ChunkTemplate:
        template = self._templates.get(index)
        if template is None:
            choice = ChatChunkChoice(index=index, delta=Delta(content=ChunkTemplate.TEXT))
            template = self._templates[index] = ChunkTemplate(_chunk(generation, [choice]))
        return template

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        return (sse(_chunk(generation, [], generation.usage)) if include_usage else b"") + DONE


def _logprobs(generation: Generation, tokens: list[TokenLogprobs]) -> ChatLogprobs | None:
    return (
        None
        if generation.params.logprobs is None
        else chat_logprobs(generation.tokenizer, tokens, spells_ids=generation.spells_ids)
    )


def _delta(delta: AnswerDelta) -> Delta:
    """Convert a delta to the format of OpenAI's API."""
    if isinstance(delta, TextDelta):
        if delta.kind == "content":
            return {"content": delta.text}
        return {"reasoning": delta.text, "reasoning_content": delta.text}
    if isinstance(delta, CallStart):
        function = FunctionCallDelta(name=delta.name, arguments="")
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _chunk(generation: Generation, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
    return ChatCompletionChunk(**generation.head, choices=choices, usage=usage)
