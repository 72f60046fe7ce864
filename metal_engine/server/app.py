"""The HTTP application: routes, and nothing that another file could do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from metal_engine import __version__
from metal_engine.config import ServerArgs
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.server.chat import ChatEndpoint
from metal_engine.server.completions import CompletionEndpoint
from metal_engine.server.errors import install_error_handlers, model_not_found
from metal_engine.server.gate import limit_body, require_api_key
from metal_engine.server.generation import BodyT, Endpoint, ServedModel, prepare
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.parameters import ParameterPolicy
from metal_engine.server.protocol import (
    ChatCompletion,
    ChatCompletionBody,
    Completion,
    CompletionBody,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    Version,
)
from metal_engine.server.streaming import EventStreamResponse, cancel_on_disconnect, stream_events
from metal_engine.server.strict_json import StrictJSONRoute

# nginx's status for a client that left; nobody receives it, but access logs show it.
CLIENT_CLOSED_REQUEST = 499

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody}}


def create_app(engine: AsyncEngine, names: Sequence[str], args: ServerArgs | None = None) -> FastAPI:
    """The application for an engine that has been started; whoever started it also shuts it down.

    Args:
        names: what the model is called in the API; answers carry the first.
        args: of which the application takes those that are about requests.
    """
    args = args or ServerArgs()
    app = FastAPI(title="metal-engine", version=__version__, responses=_ERRORS)
    app.router.route_class = StrictJSONRoute
    install_error_handlers(app)
    served = ServedModel(engine, tuple(names), ParameterPolicy(strict=args.strict_params))
    lifecycle = app.state.lifecycle = Lifecycle(engine)
    _add_generation_routes(app, served)
    _add_model_routes(app, served)
    _add_status_routes(app, served, lifecycle)
    _add_gates(app, args, lifecycle)
    return app


def _add_gates(app: FastAPI, args: ServerArgs, lifecycle: Lifecycle) -> None:
    # The last one added is the first to see a request.
    app.add_middleware(_middleware(lambda inner: limit_body(inner, args.max_body_size)))
    if args.api_key is not None:
        api_key = args.api_key
        app.add_middleware(_middleware(lambda inner: require_api_key(inner, api_key)))
    app.add_middleware(_middleware(lifecycle.middleware))


def _middleware(wrap: Callable[[ASGIApp], ASGIApp]) -> Any:
    """A function that wraps an application, in the form that Starlette asks for."""

    def make(app: ASGIApp) -> ASGIApp:
        return wrap(app)

    return make


def _add_generation_routes(app: FastAPI, served: ServedModel) -> None:
    completion_endpoint = CompletionEndpoint()
    chat_endpoint = ChatEndpoint()

    @app.post("/v1/completions", response_model=Completion)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        return await _answer(served, completion_endpoint, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        return await _answer(served, chat_endpoint, body, request)


async def _answer(served: ServedModel, endpoint: Endpoint[BodyT], body: BodyT, request: Request) -> Response:
    generation = await prepare(served, endpoint, body)
    if body.stream:
        return EventStreamResponse(stream_events(generation, endpoint, body.include_usage))
    try:
        await cancel_on_disconnect(request.receive, generation.finish())
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _json(endpoint.response(generation))


def _json(body: Any) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _add_model_routes(app: FastAPI, served: ServedModel) -> None:
    max_model_len = served.engine.config.scheduler.max_model_len
    created = int(time.time())
    cards = {name: ModelCard(id=name, created=created, max_model_len=max_model_len) for name in served.names}

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=list(cards.values()))

    @app.get("/v1/models/{model_id:path}")  # names of models have slashes
    async def get_model(model_id: str) -> ModelCard:
        if model_id not in cards:
            raise model_not_found(model_id)
        return cards[model_id]


def _add_status_routes(app: FastAPI, served: ServedModel, lifecycle: Lifecycle) -> None:
    engine = served.engine

    @app.get("/health", responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        stats = engine.stats
        error = engine.error
        body = Health(
            status="error" if error is not None else "draining" if lifecycle.draining else "ok",
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_cache_usage=stats.num_used_blocks / stats.num_blocks,
            preemptions=stats.num_preemptions,
            failed_steps=engine.core.num_failed_steps,
            unknown_parameters=served.parameters.num_unknown,
            kv_transfer=None if (kv := engine.core.kv_transfer_stats) is None else kv.as_dict(),
            error=None if error is None else f"the engine has stopped: {error!r}",
        )
        status = 200 if body.status == "ok" else 503
        return JSONResponse(body.model_dump(exclude_none=True), status_code=status)

    @app.get("/version")
    async def version() -> Version:
        return Version(version=__version__)
