"""The HTTP application: routes, and nothing that another file could do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from metal_engine import __version__
from metal_engine.config import ServerArgs
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.server.chat import ChatEndpoint
from metal_engine.server.completions import CompletionEndpoint
from metal_engine.server.errors import install_error_handlers
from metal_engine.server.gate import limit_body, require_api_key
from metal_engine.server.generation import BodyT, Endpoint, ServedModel, prepare
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.metrics import ServerMetrics
from metal_engine.server.observe import observe
from metal_engine.server.parameters import ParameterPolicy
from metal_engine.server.parsers import Parsers
from metal_engine.server.protocol import (
    ChatCompletion,
    ChatCompletionBody,
    Completion,
    CompletionBody,
    ErrorBody,
)
from metal_engine.server.status import add_model_routes, add_status_routes
from metal_engine.server.streaming import EventStreamResponse, cancel_on_disconnect, stream_events
from metal_engine.server.strict_json import StrictJSONRoute
from metal_engine.server.tokenization import add_tokenization_routes

# nginx's status for a client that left; nobody receives it, but access logs show it.
CLIENT_CLOSED_REQUEST = 499

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody}}


def create_app(
    engine: AsyncEngine, names: Sequence[str], args: ServerArgs | None = None, parsers: Parsers | None = None
) -> FastAPI:
    """The application for an engine that has been started; whoever started it also shuts it down.

    Args:
        names: what the model is called in the API; answers carry the first.
        args: of which the application takes those that are about requests.
        parsers: how the model writes tool calls and reasoning; without them, all is plain text.
    """
    args = args or ServerArgs()
    app = FastAPI(title="metal-engine", version=__version__, responses=_ERRORS)
    app.router.route_class = StrictJSONRoute
    install_error_handlers(app)
    served = ServedModel(
        engine, tuple(names), ParameterPolicy(strict=args.strict_params), parsers or Parsers()
    )
    lifecycle = app.state.lifecycle = Lifecycle(engine)
    metrics = ServerMetrics(engine, served.names[0])
    _add_generation_routes(app, served)
    add_tokenization_routes(app, served)
    add_model_routes(app, served)
    add_status_routes(app, served, lifecycle, metrics)
    _add_gates(app, args, lifecycle, metrics)
    return app


def _add_gates(app: FastAPI, args: ServerArgs, lifecycle: Lifecycle, metrics: ServerMetrics) -> None:
    # The last one added is the first to see a request.
    app.add_middleware(_middleware(lambda inner: limit_body(inner, args.max_body_size)))
    if args.api_key is not None:
        api_key = args.api_key
        app.add_middleware(_middleware(lambda inner: require_api_key(inner, api_key)))
    app.add_middleware(_middleware(lifecycle.middleware))
    app.add_middleware(_middleware(lambda inner: observe(inner, metrics)))


def _middleware(wrap: Callable[[ASGIApp], ASGIApp]) -> Any:
    """A function that wraps an application, in the form that Starlette asks for."""

    def make(app: ASGIApp) -> ASGIApp:
        return wrap(app)

    return make


def _add_generation_routes(app: FastAPI, served: ServedModel) -> None:
    @app.post("/v1/completions", tags=["generation"], response_model=Completion)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        return await _answer(served, CompletionEndpoint(), body, request)

    @app.post("/v1/chat/completions", tags=["generation"], response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        return await _answer(served, ChatEndpoint(served.parsers), body, request)


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
