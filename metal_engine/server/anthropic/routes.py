"""Routes of Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from metal_engine.media.sources import ImageSource
from metal_engine.server.anthropic import protocol
from metal_engine.server.anthropic.messages import MessagesEndpoint
from metal_engine.server.errors import anthropic_error, renaming
from metal_engine.server.generation.image_loading import with_image_tokens
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.response_runner import EVENTS, PreparationErrors, ResponseRunner
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.workers import Weight

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": protocol.AnthropicError}}
_PREPARATION_ERRORS = PreparationErrors(lambda error: named_sse(anthropic_error(error)), protocol.RENAMED)
_ANSWERS = {**EVENTS, **_ERRORS}


def add_anthropic_routes(app: FastAPI, models: ModelProvider, runner: ResponseRunner) -> None:
    @app.post("/v1/messages", tags=["messages"], response_model=protocol.AnthropicResponse, responses=_ANSWERS)
    async def create_message(body: protocol.MessagesBody, request: Request) -> Response:
        with renaming(protocol.RENAMED):
            chat = await models.workers.run_if_large(len(await request.body()), protocol.to_chat, body)
            return await runner.run(request, MessagesEndpoint, MessagesEndpoint, chat, _PREPARATION_ERRORS)

    @app.post("/v1/messages/count_tokens", tags=["messages"], responses=_ERRORS)
    async def count_tokens(body: protocol.CountTokensBody, request: Request) -> protocol.TokenCount:
        with renaming(protocol.RENAMED):
            weight = Weight.of(len(await request.body()))
            served = await models.use(request, body.model)
            prompt, images = await served.workers.run(weight, _tokens, served, body)
            prompt = await with_image_tokens(served, images, weight, prompt)
            return protocol.TokenCount(input_tokens=len(prompt))


def _tokens(served: ServedModel, body: protocol.CountTokensBody) -> tuple[list[int], list[ImageSource]]:
    """Return the token ids of a conversation, and the sources of its images.

    The token ids have a placeholder in place of each image.

    Raises:
        APIError: status 400, for a request that cannot be converted to a prompt.
    """
    chat = protocol.to_chat(body)
    served.parameters.check(chat)
    endpoint = MessagesEndpoint(served)
    (prompt,) = endpoint.tokenize(chat, served.tokenizer_beyond_context)
    return prompt, endpoint.image_sources(chat)
