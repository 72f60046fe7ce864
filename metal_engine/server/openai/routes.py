"""Routes of OpenAI's completions and chat completions."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from metal_engine.server.generation.response_runner import EVENTS, ResponseRunner
from metal_engine.server.openai.chat import ChatEndpoint
from metal_engine.server.openai.completions import CompletionEndpoint
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody
from metal_engine.server.response_bodies import ChatCompletion, Completion


def add_openai_routes(app: FastAPI, runner: ResponseRunner) -> None:
    @app.post("/v1/completions", tags=["generation"], response_model=Completion, responses=EVENTS)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        return await runner.run(request, CompletionEndpoint, lambda _: CompletionEndpoint(), body)

    @app.post("/v1/chat/completions", tags=["generation"], response_model=ChatCompletion, responses=EVENTS)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        return await runner.run(request, ChatEndpoint, ChatEndpoint, body)
