"""``/v1/completions``: what sets it apart from other generating endpoints."""

from __future__ import annotations

from typing import cast

from pydantic import BaseModel

from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.request import RequestOutput
from metal_engine.server.errors import APIError, invalid
from metal_engine.server.generation import Generation, finish_reason
from metal_engine.server.protocol import Completion, CompletionBody, CompletionChoice, Usage
from metal_engine.server.streaming import DONE, ChunkTemplate, sse


class CompletionEndpoint:
    """Implements :class:`metal_engine.server.generation.Endpoint` for one request."""

    id_prefix = "cmpl"

    def __init__(self) -> None:
        self._templates: dict[int, ChunkTemplate] = {}

    def tokenize(self, body: CompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
        prompts = _prompts(body)
        if not prompts:
            raise invalid("prompt must not be empty", param="prompt")
        try:
            return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        except ValueError as error:
            raise invalid(f"prompt: {error}", param="prompt") from error

    def adjust(self, body: CompletionBody) -> CompletionBody:
        return body

    def response(self, generation: Generation) -> BaseModel:
        choices = [
            CompletionChoice(
                index=choice.index,
                text=choice.text,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in generation.choices
        ]
        return _completion(generation, choices, generation.usage)

    def begin(self, generation: Generation) -> bytes:
        return b""

    def chunk(self, generation: Generation, index: int, output: RequestOutput, first: bool) -> bytes:
        if output.finish_reason is None:
            if not output.text:
                return b""
            template = self._templates.get(index)
            if template is None:
                choice = CompletionChoice(index=index, text=ChunkTemplate.TEXT)
                template = self._templates[index] = ChunkTemplate(_completion(generation, [choice]))
            return template.fill(output.text)
        choice = CompletionChoice(
            index=index,
            text=output.text,
            finish_reason=finish_reason(output),
            stop_reason=output.stop_reason,
        )
        return sse(_completion(generation, [choice]))

    def end(self, generation: Generation, include_usage: bool) -> bytes:
        return (sse(_completion(generation, [], generation.usage)) if include_usage else b"") + DONE

    def error(self, generation: Generation, error: APIError) -> bytes:
        return sse(error.body)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """The body's prompt in any of its four forms, as a list of texts or token id lists."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return cast(list[str | list[int]], prompt)


def _completion(
    generation: Generation, choices: list[CompletionChoice], usage: Usage | None = None
) -> Completion:
    return Completion(
        id=generation.request_id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=usage,
    )
