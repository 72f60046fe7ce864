"""Routes about the server: its models, health and metrics."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.responses import Response

from metal_engine import __version__
from metal_engine.server.generation.model_provider import ModelProvider, MultiModel, SingleModel
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.status.metrics import ServerMetrics
from metal_engine.server.status.pages import PAGE_HEADERS, api_page
from metal_engine.server.status.protocol import (
    Health,
    ModelCard,
    ModelList,
    ReadyResponse,
    RegistryHealth,
    ServerInfo,
    Version,
)
from metal_engine.server.status.registry_routes import (
    Discover,
    add_loading_routes,
    add_registry_routes,
    registry_health,
)
from metal_engine.server.workers import Weight

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])

# Key in the ASGI scope of each request to a server with an API key. The value is True if the request was accepted
# without the API key.
WITHOUT_KEY = "metal_engine.without_key"


def get_and_head(app: FastAPI, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
    """Return a decorator that adds an endpoint for GET and HEAD. The OpenAPI schema has only GET.

    Probes send HEAD. ``options`` are arguments of :meth:`FastAPI.get`.
    """

    def add(endpoint: EndpointT) -> EndpointT:
        app.get(path, **options)(endpoint)
        app.head(path, include_in_schema=False)(endpoint)
        return endpoint

    return add


def add_model_routes(app: FastAPI, models: ModelProvider, discover: Discover | None = None) -> None:
    created = int(time.time())
    if isinstance(models, MultiModel):
        if discover is not None:
            add_loading_routes(app, models, discover, created)
        add_registry_routes(app, models, created)
    elif isinstance(models, SingleModel):
        _add_single_model_routes(app, models.served, created)


def _add_single_model_routes(app: FastAPI, served: ServedModel, created: int) -> None:
    config = served.engine.config
    max_model_len = config.scheduler.max_model_len

    def card(one: ServedModel, name: str) -> ModelCard:
        if one.adapter is not None:
            root, parent = one.adapter.path, one.adapter.base_model_name or served.names[0]
            return ModelCard(id=name, created=created, root=root, parent=parent, max_model_len=max_model_len)
        root, memory_bytes = config.model.name, config.peak_bytes
        return ModelCard(id=name, created=created, root=root, max_model_len=max_model_len, memory_bytes=memory_bytes)

    @get_and_head(app, "/v1/models", tags=["models"], response_model_exclude_none=True)
    async def list_models() -> ModelList:
        return ModelList(data=[card(served.resolve(name), name) for name in served.all_names])

    # Model names can contain slashes.
    @app.get("/v1/models/{model_id:path}", tags=["models"], response_model_exclude_none=True)
    async def get_model(model_id: str) -> ModelCard:
        found = served.resolve(model_id)
        return card(found, model_id if model_id in found.names else found.names[0])


def add_docs(app: FastAPI, models: ModelProvider) -> None:
    """Add the page that describes the API, at ``/docs`` and ``/redoc``."""

    # /redoc is the address of FastAPI's other documentation page.
    @get_and_head(app, "/docs", include_in_schema=False)
    @get_and_head(app, "/redoc", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(await models.workers.run(Weight.LIGHT, _docs, app), headers=PAGE_HEADERS)


def _docs(app: FastAPI) -> bytes:
    if not hasattr(app.state, "docs"):
        app.state.docs = api_page(app.openapi()).encode()
    page: bytes = app.state.docs
    return page


def _may_see_names(request: Request) -> bool:
    """Return True if the client may see parameter names from other clients' requests.

    If the server has a key, the client must have sent the key. Otherwise, the client must connect from a loopback
    address. A client of a Unix socket does not count as local, because its address is unknown.
    """
    without_key = request.scope.get(WITHOUT_KEY)
    if without_key is not None:
        return not without_key
    if request.client is None:  # unix socket: the client is not known
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _health(served: ServedModel, lifecycle: Lifecycle, *, shows_parameters: bool, shows_error: bool) -> Health:
    """Return the health of a server with one model.

    ``shows_parameters`` is as in :func:`registry_health`. ``shows_error`` is True if the client may see the engine's
    own error.
    """
    engine, unknown = served.engine, served.parameters.num_unknown
    stats, error = engine.stats, engine.error
    return Health(
        status=_status(served, lifecycle),
        running=stats.num_running,
        waiting=stats.num_waiting,
        kv_cache_usage=stats.num_used_blocks / stats.num_blocks,
        kv_cache_dtype=engine.config.model.kv_dtype,
        attention=engine.config.attention,
        requests=engine.config.requests,
        dispatch=engine.config.dispatch or None,
        command_buffers=None if (limits := engine.config.command_buffers) is None else str(limits),
        replay=_replay(served),
        speculation=engine.config.speculation,
        images=engine.config.model.images,
        preemptions=stats.num_preemptions,
        failed_steps=engine.metrics.num_failed_steps,
        unconstrained_calls=engine.metrics.num_unconstrained_calls,
        num_unknown_parameters=sum(unknown.values()),
        unknown_parameters=unknown if shows_parameters else {},
        kv_transfer=None if (kv := engine.metrics.kv_transfer) is None else kv.as_dict(),
        error=None
        if error is None
        else f"the engine has stopped: {error!r}"
        if shows_error
        else "the engine has stopped",
    )


def _status(served: ServedModel, lifecycle: Lifecycle) -> Literal["ok", "draining", "restarting", "error"]:
    if served.engine.error is not None:
        return "error"
    return "draining" if lifecycle.draining else "restarting" if served.engine.is_restarting else "ok"


def _replay(served: ServedModel) -> str:
    refusal = served.engine.metrics.replay_refusal
    return served.engine.config.replay if refusal is None else f"off: {refusal}"


_MODES: dict[str | None, Literal["prefill", "decode"]] = {"kv_producer": "prefill", "kv_consumer": "decode"}


def _server_info(served: ServedModel) -> ServerInfo:
    config = served.engine.config
    return ServerInfo(
        model=served.names[0],
        model_path=config.model.name,
        served_model_name=served.names[0],
        version=__version__,
        context_length=config.scheduler.max_model_len,
        max_total_tokens=config.cache.num_tokens,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_running_requests=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        disaggregation_mode=_MODES.get(config.kv_role, "null"),
    )


def add_status_routes(app: FastAPI, models: ModelProvider, lifecycle: Lifecycle, metrics: ServerMetrics) -> None:
    kind = RegistryHealth if isinstance(models, MultiModel) else Health

    @get_and_head(app, "/health", tags=["status"], responses={503: {"model": kind}})
    async def health(request: Request) -> JSONResponse:
        shows_parameters = _may_see_names(request)
        body: Health | RegistryHealth
        shows_errors = not request.scope.get(WITHOUT_KEY, False)  # also for models, as in /v1/models
        if isinstance(models, MultiModel):
            unknown = models.parameters.num_unknown
            draining = lifecycle.draining
            body = registry_health(
                models, draining=draining, unknown=unknown, shows_parameters=shows_parameters, shows_models=shows_errors
            )
        else:
            (served,) = models.loaded
            body = _health(served, lifecycle, shows_parameters=shows_parameters, shows_error=shows_errors)
        status = 200 if body.status == "ok" else 503
        return JSONResponse(body.model_dump(exclude_none=True), status_code=status)

    @get_and_head(app, "/ready", tags=["status"], responses={503: {"model": ReadyResponse}})
    async def ready() -> JSONResponse:
        """Respond with status 200 if requests can run. Respond with 503 while the server drains or its engine restarts,
        and after its engine has stopped.
        """
        is_ready = models.error is None and not lifecycle.draining and not models.is_restarting
        return JSONResponse(ReadyResponse(ready=is_ready).model_dump(), status_code=200 if is_ready else 503)

    @get_and_head(app, "/version", tags=["status"])
    async def version() -> Version:
        return Version(version=__version__)

    if isinstance(models, SingleModel):
        served = models.served

        # /get_server_info is the older name, which gateways still use.
        @app.get("/get_server_info", include_in_schema=False)
        @get_and_head(app, "/server_info", tags=["status"])
        async def server_info() -> ServerInfo:
            return _server_info(served)

    formats: dict[str, Any] = {"text/plain": {}, "application/openmetrics-text": {}}

    @get_and_head(app, "/metrics", tags=["status"], response_class=Response, responses={200: {"content": formats}})
    async def metrics_(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})
