"""Routes that generate: OpenAI's and Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from metal_engine.args import ServerArgs
from metal_engine.server import anthropic_protocol, responses_protocol
from metal_engine.server.anthropic import MessagesEndpoint
from metal_engine.server.anthropic_protocol import (
    AnthropicError,
    AnthropicResponse,
    CountTokensBody,
    MessagesBody,
    TokenCount,
)
from metal_engine.server.chat import ChatEndpoint
from metal_engine.server.completions import CompletionEndpoint
from metal_engine.server.errors import APIError
from metal_engine.server.preparation import BodyT, Endpoint, ServedModel, prepare
from metal_engine.server.protocol import ChatCompletion, ChatCompletionBody, Completion, CompletionBody
from metal_engine.server.responses import ResponsesEndpoint, ResponseStore, chat_of
from metal_engine.server.responses_protocol import DeletedResponse, ResponsesBody
from metal_engine.server.streaming import EventStreamResponse, cancel_on_disconnect, stream_events

# nginx's status for a client that left; nobody receives it, but access logs show it.
CLIENT_CLOSED_REQUEST = 499

_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def add_generation_routes(app: FastAPI, served: ServedModel, args: ServerArgs) -> None:
    answer = Answerer(served, args)
    _add_openai_routes(app, served, answer, ResponseStore(args.max_stored_responses))
    _add_anthropic_routes(app, served, answer)


class Answerer:
    """Runs a request to its answer: one body, or a stream of events."""

    def __init__(self, served: ServedModel, args: ServerArgs) -> None:
        self._served = served
        self._args = args

    async def __call__(self, endpoint: Endpoint[BodyT], body: BodyT, request: Request) -> Response:
        generation = await prepare(self._served, endpoint, body)
        if body.stream:
            events = stream_events(generation, endpoint, body.include_usage, body.continuous_usage)
            return EventStreamResponse(events, keep_alive=self._args.sse_keep_alive)
        try:
            await cancel_on_disconnect(request.receive, generation.finish())
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(endpoint.response(generation).model_dump_json(), media_type="application/json")


def _add_openai_routes(app: FastAPI, served: ServedModel, answer: Answerer, store: ResponseStore) -> None:
    @app.post("/v1/completions", tags=["generation"], response_model=Completion, responses=_EVENTS)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        return await answer(CompletionEndpoint(), body, request)

    @app.post("/v1/chat/completions", tags=["generation"], response_model=ChatCompletion, responses=_EVENTS)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        return await answer(ChatEndpoint(served.parsers), body, request)

    @app.post(
        "/v1/responses", tags=["responses"], response_model=responses_protocol.Response, responses=_EVENTS
    )
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        try:
            chat, messages = chat_of(body, store)
            return await answer(ResponsesEndpoint(served, store, body, messages), chat, request)
        except APIError as error:
            raise responses_protocol.renamed(error) from error

    @app.get("/v1/responses/{response_id}", tags=["responses"], response_model=responses_protocol.Response)
    async def get_response(response_id: str) -> Response:
        return JSONResponse(store.get(response_id).response)

    @app.delete("/v1/responses/{response_id}", tags=["responses"])
    async def delete_response(response_id: str) -> DeletedResponse:
        store.delete(response_id)
        return DeletedResponse(id=response_id)


_ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": AnthropicError}}


def _add_anthropic_routes(app: FastAPI, served: ServedModel, answer: Answerer) -> None:
    @app.post(
        "/v1/messages",
        tags=["messages"],
        response_model=AnthropicResponse,
        responses={**_EVENTS, **_ANTHROPIC_ERRORS},
    )
    async def create_message(body: MessagesBody, request: Request) -> Response:
        try:
            return await answer(MessagesEndpoint(served), anthropic_protocol.to_chat(body), request)
        except APIError as error:
            raise anthropic_protocol.renamed(error) from error

    @app.post("/v1/messages/count_tokens", tags=["messages"], responses=_ANTHROPIC_ERRORS)
    async def count_tokens(body: CountTokensBody) -> TokenCount:
        chat = anthropic_protocol.to_chat(body)
        served.check_model(chat.model)
        served.parameters.check(chat)
        (prompt,) = await asyncio.to_thread(MessagesEndpoint(served).tokenize, chat, served.engine.tokenizer)
        return TokenCount(input_tokens=len(prompt))
