"""Generating routes of OpenAI's API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from metal_engine.server.errors import renaming
from metal_engine.server.generation.answerer import EVENTS, Answerer, LateErrors
from metal_engine.server.generation.models import Models
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.openai import responses_protocol
from metal_engine.server.openai.chat import ChatEndpoint
from metal_engine.server.openai.completions import CompletionEndpoint
from metal_engine.server.openai.responses import ResponsesEndpoint, ResponseStore, read_request, responses_error
from metal_engine.server.protocol import ChatCompletion, ChatCompletionBody, Completion, CompletionBody

_LATE_ERRORS = LateErrors(responses_error, responses_protocol.RENAMED)


def add_openai_routes(app: FastAPI, models: Models, answer: Answerer, store: ResponseStore) -> None:
    @app.post("/v1/completions", tags=["generation"], response_model=Completion, responses=EVENTS)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        return await answer(request, CompletionEndpoint, lambda _: CompletionEndpoint(), body)

    @app.post("/v1/chat/completions", tags=["generation"], response_model=ChatCompletion, responses=EVENTS)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        return await answer(request, ChatEndpoint, ChatEndpoint, body)

    @app.post("/v1/responses", tags=["responses"], response_model=responses_protocol.Response, responses=EVENTS)
    async def create_response(body: responses_protocol.ResponsesBody, request: Request) -> Response:
        with renaming(responses_protocol.RENAMED):
            earlier = store.messages(body.previous_response_id)
            num_earlier = store.num_characters(body.previous_response_id or "")
            num_bytes = len(await request.body()) + num_earlier
            chat, asked = await models.workers.run_if_large(num_bytes, read_request, body, earlier)

            def endpoint(served: ServedModel) -> ResponsesEndpoint:
                return ResponsesEndpoint(served, store, asked)

            return await answer(
                request, ResponsesEndpoint, endpoint, chat, _LATE_ERRORS, num_earlier_characters=num_earlier
            )

    @app.get("/v1/responses/{response_id}", tags=["responses"], response_model=responses_protocol.Response)
    async def get_response(response_id: str) -> Response:
        return JSONResponse(store.get(response_id).response)

    @app.delete("/v1/responses/{response_id}", tags=["responses"])
    async def delete_response(response_id: str) -> responses_protocol.DeletedResponse:
        store.delete(response_id)
        return responses_protocol.DeletedResponse(id=response_id)
