"""The HTTP application: routes, and nothing that another file could do."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from metal_engine import __version__
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.server.chat import ChatEndpoint
from metal_engine.server.completions import CompletionEndpoint
from metal_engine.server.errors import install_error_handlers, model_not_found
from metal_engine.server.generation import BodyT, Endpoint, prepare
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

logger = logging.getLogger(__name__)

# nginx's status for a client that left; nobody receives it, but access logs show it.
CLIENT_CLOSED_REQUEST = 499

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody}}


def create_app(engine: AsyncEngine, *, served_model_name: str) -> FastAPI:
    """The application for an engine that has been started; whoever started it also shuts it down.

    Args:
        served_model_name: name of the model in the API.
    """
    app = FastAPI(title="metal-engine", version=__version__, responses=_ERRORS)
    install_error_handlers(app)
    _add_generation_routes(app, engine, served_model_name)
    _add_model_routes(app, engine, served_model_name)
    _add_status_routes(app, engine)
    return app


def _add_generation_routes(app: FastAPI, engine: AsyncEngine, model: str) -> None:
    completion_endpoint = CompletionEndpoint()
    chat_endpoint = ChatEndpoint()

    @app.post("/v1/completions", response_model=Completion)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        return await _answer(engine, model, completion_endpoint, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        return await _answer(engine, model, chat_endpoint, body, request)


async def _answer(
    engine: AsyncEngine, model: str, endpoint: Endpoint[BodyT], body: BodyT, request: Request
) -> Response:
    generation = await prepare(engine, model, endpoint, body)
    if body.stream:
        return EventStreamResponse(stream_events(generation, endpoint, body.include_usage))
    try:
        await cancel_on_disconnect(request.receive, generation.finish())
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _json(endpoint.response(generation))


def _json(body: Any) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _add_model_routes(app: FastAPI, engine: AsyncEngine, model: str) -> None:
    card = ModelCard(id=model, created=int(time.time()), max_model_len=engine.config.scheduler.max_model_len)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card])

    @app.get("/v1/models/{model_id:path}")  # names of models have slashes
    async def get_model(model_id: str) -> ModelCard:
        if model_id != model:
            raise model_not_found(model_id)
        return card


def _add_status_routes(app: FastAPI, engine: AsyncEngine) -> None:
    @app.get("/health", responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        stats = engine.stats
        error = engine.error
        body = Health(
            status="ok" if error is None else "error",
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_cache_usage=stats.num_used_blocks / stats.num_blocks,
            preemptions=stats.num_preemptions,
            error=None if error is None else f"the engine has stopped: {error!r}",
        )
        return JSONResponse(body.model_dump(exclude_none=True), status_code=200 if error is None else 503)

    @app.get("/version")
    async def version() -> Version:
        return Version(version=__version__)


class Server(uvicorn.Server):
    """uvicorn, saying where it listens in one line."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            logger.info("serving on http://%s:%d", self.config.host, self.port)

    @property
    def port(self) -> int:
        """The port listened on; differs from the one asked for if that was 0."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def make_server(app: FastAPI, host: str, port: int, *, shutdown_timeout: int = 10) -> Server:
    """A server that is not running yet.

    Args:
        port: 0 for any free one.
        shutdown_timeout: seconds that requests under way may take to finish when the server stops.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        timeout_graceful_shutdown=shutdown_timeout,
        log_config=None,  # the process has one logging set-up, the command line's
        access_log=False,
        lifespan="off",
    )
    return Server(config)


def run_server(app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        SystemExit: the address cannot be listened on.
    """
    with suppress(KeyboardInterrupt):
        make_server(app, host, port).run()
