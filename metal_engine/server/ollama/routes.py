"""Routes of Ollama's API, for tools that support no other API."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from metal_engine.server.embeddings.embeddings import FEW, MAX_NUMBERS, vectors_json
from metal_engine.server.embeddings.pooling import Pooled, PoolingRequest, embed, pooling_request
from metal_engine.server.errors import APIError, renaming
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.response_runner import ResponseRunner
from metal_engine.server.json_parts import JSONParts
from metal_engine.server.ollama import models, protocol
from metal_engine.server.ollama.endpoints import NDJSON, OllamaChat, OllamaGenerate, OllamaRaw, timestamp
from metal_engine.server.ollama.requests import RENAMED, RawBody, RequestReader
from metal_engine.server.status.routes import get_and_head
from metal_engine.server.workers import Weight

# Version of Ollama that has this API. Clients compare it with the version that introduced a feature.
API_VERSION = "0.12.0"

_NO_PULL = (
    "this server does not download models for clients: run `metal-engine pull OWNER/NAME` on its machine for a "
    "repository on the Hugging Face hub, then `metal-engine serve OWNER/NAME`"
)

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": protocol.OllamaError}}
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {}}}, **_ERRORS}


def add_ollama_routes(app: FastAPI, all_models: ModelProvider, runner: ResponseRunner) -> None:
    reader = RequestReader()

    def named(body: protocol.OllamaBody | protocol.OllamaEmbedBody | protocol.OllamaEmbeddingsBody) -> str:
        """Return the client's name of the model. Sets the model of the body to it.

        Raises APIError, a 404, for an unknown name.
        """
        body.model = body.model or all_models.names[0]
        all_models.check(body.model)
        return body.model

    @app.post("/api/chat", tags=["ollama"], response_model=protocol.ChatAnswer, responses=_ANSWERS)
    async def ollama_chat(body: protocol.OllamaChatBody, request: Request) -> Response:
        name = named(body)
        if not body.messages:
            await all_models.use(request, body.model)
            return _loaded(protocol.ChatAnswer, name, message=protocol.AnswerMessage())
        with renaming(RENAMED):
            num_bytes = len(await request.body())
            served = await all_models.use(request, body.model)
            chat = await served.workers.run_if_large(num_bytes, reader.chat, served, body)
            return await runner.run(request, OllamaChat, lambda model: OllamaChat(model, name), chat, None)

    @app.post("/api/generate", tags=["ollama"], response_model=protocol.GenerateAnswer, responses=_ANSWERS)
    async def ollama_generate(body: protocol.OllamaGenerateBody, request: Request) -> Response:
        name = named(body)
        if not (body.prompt or body.suffix):
            await all_models.use(request, body.model)
            return _loaded(protocol.GenerateAnswer, name)
        with renaming({**RENAMED, "messages": "prompt"}):
            num_bytes = len(await request.body())
            served = await all_models.use(request, body.model)
            made = await served.workers.run_if_large(num_bytes, reader.generate, served, body)
            if isinstance(made, RawBody):
                return await runner.run(request, OllamaRaw, lambda _: OllamaRaw(name), made, None)
            return await runner.run(request, OllamaGenerate, lambda model: OllamaGenerate(model, name), made, None)

    @app.post("/api/embed", tags=["ollama"], response_model=protocol.EmbedAnswer, responses=_ERRORS)
    async def ollama_embed(body: protocol.OllamaEmbedBody, request: Request) -> Response:
        name = named(body)
        served = await all_models.use(request, body.model)
        data = await _embed(await pooling_request(served, request, body), body, name)
        return Response(data, media_type="application/json")

    @app.post("/api/embeddings", tags=["ollama"], response_model=protocol.EmbeddingsAnswer, responses=_ERRORS)
    async def ollama_embeddings(body: protocol.OllamaEmbeddingsBody, request: Request) -> Response:
        named(body)
        served = await all_models.use(request, body.model)
        data = await _embedding(await pooling_request(served, request, body), body)
        return Response(data, media_type="application/json")

    _add_model_routes(app, all_models)


def _loaded(kind: type[protocol.OllamaAnswer], name: str, **fields: Any) -> Response:
    """Return the response to a request without a prompt, which Ollama's clients send to load or unload a model.

    The caller has loaded the model. It stays loaded even if the client wants to unload it.
    """
    answer = kind(model=name, created_at=timestamp(time.time()), done=True, done_reason="load", **fields)
    return JSONResponse(answer.model_dump())


async def _embed(pooling: PoolingRequest, body: protocol.OllamaEmbedBody, name: str) -> bytes:
    """Return the response of ``/api/embed`` as JSON. ``name`` is the client's name of the model.

    Raises:
        APIError, EngineDeadError: as :func:`embed`. Status 500 for a vector with NaN or infinity.
    """
    started = time.monotonic()
    inputs = [body.input] if isinstance(body.input, str) else body.input or []
    vectors, num_tokens = await _vectors(pooling, inputs, "input", body.dimensions)
    parts = JSONParts()
    answer = protocol.EmbedAnswer(
        model=name,
        embeddings=parts.add(b"[" + b",".join(vectors) + b"]"),
        total_duration=round((time.monotonic() - started) * 1e9),
        prompt_eval_count=num_tokens,
    )
    return parts.encode(answer)


async def _embedding(pooling: PoolingRequest, body: protocol.OllamaEmbeddingsBody) -> bytes:
    """Return the response of ``/api/embeddings`` as JSON. Raises as :func:`_embed`."""
    inputs = [] if body.prompt is None else [body.prompt]
    vectors, _ = await _vectors(pooling, inputs, "prompt")
    parts = JSONParts()
    return parts.encode(protocol.EmbeddingsAnswer(embedding=parts.add(vectors[0] if vectors else b"[]")))


async def _vectors(
    pooling: PoolingRequest, inputs: list[str], field: str, dimensions: int | None = None
) -> tuple[list[bytes], int]:
    """Return each input's vector as JSON, and the number of tokens of all inputs. Raises as :func:`_embed`.

    For an empty list or a single empty text, the result is no vectors and 0. Clients send these inputs only to load a
    model.
    """
    if inputs in ([], [""]):
        return [], 0
    pooled = await embed(pooling, list(inputs), dimensions=dimensions, field=field, max_values=MAX_NUMBERS)
    if sum(vector.size for vector in pooled.vectors) <= FEW:
        return _encoded(pooled), pooled.num_prompt_tokens
    return await pooling.served.workers.run(Weight.HEAVY, _encoded, pooled), pooled.num_prompt_tokens


def _encoded(pooled: Pooled) -> list[bytes]:
    return list(vectors_json(pooled))


def _add_model_routes(app: FastAPI, all_models: ModelProvider) -> None:
    started_at = timestamp(time.time())

    @get_and_head(app, "/api/tags", tags=["ollama"], responses=_ERRORS)
    async def ollama_tags() -> protocol.Tags:
        return protocol.Tags(models=models.listed(all_models, started_at))

    @get_and_head(app, "/api/ps", tags=["ollama"], responses=_ERRORS)
    async def ollama_ps() -> protocol.PsResponse:
        return protocol.PsResponse(models=models.running(all_models, started_at))

    @get_and_head(app, "/api/version", tags=["ollama"], responses=_ERRORS)
    async def ollama_version() -> protocol.OllamaVersion:
        return protocol.OllamaVersion(version=API_VERSION)

    @app.post("/api/pull", tags=["ollama"], responses=_ERRORS)
    async def ollama_pull() -> Response:
        """Refuse to download a model: a download needs the command line."""
        raise APIError(404, _NO_PULL, code="unsupported_operation")

    @app.post("/api/show", tags=["ollama"], responses=_ERRORS)
    async def ollama_show(body: protocol.OllamaShowBody) -> protocol.Shown:
        name = body.model or body.name or all_models.names[0]
        all_models.check(name)
        return models.shown(all_models, name, started_at)
