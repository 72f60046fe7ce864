"""The HTTP application: combines routes and middleware from the other modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from metal_engine import __version__
from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.checkpoints.path_settings import existing_folder
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.errors import ConfigError
from metal_engine.server.anthropic.routes import add_anthropic_routes
from metal_engine.server.embeddings.routes import add_pooling_routes
from metal_engine.server.errors import install_error_handlers
from metal_engine.server.generation.model_provider import ModelProvider, MultiModel, SingleModel, served_model
from metal_engine.server.generation.parameters import ParameterPolicy
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.generation.response_runner import GENERATION_ID, ResponseRunner
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.lora import add_lora_routes
from metal_engine.server.middleware.gate import limit_body, only_probes_if_spare, require_api_key
from metal_engine.server.middleware.hosts import allow_hosts, checks_hosts
from metal_engine.server.middleware.observe import observe
from metal_engine.server.middleware.origins import own_origins_only
from metal_engine.server.middleware.strict_json import StrictJSONRoute
from metal_engine.server.ollama.routes import add_ollama_routes
from metal_engine.server.openai.response_routes import add_response_routes
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.server.openai.routes import add_openai_routes
from metal_engine.server.page.routes import WATCH, add_page
from metal_engine.server.response_bodies import ErrorBody
from metal_engine.server.status.metrics import ServerMetrics
from metal_engine.server.status.registry_routes import Discover
from metal_engine.server.status.routes import add_docs, add_model_routes, add_status_routes
from metal_engine.server.tokenization import add_tokenization_routes
from metal_engine.server.workers import Workers
from metal_engine.settings.lora_args import MODULES as LORA_MODULES
from metal_engine.settings.server_args import ServerArgs

_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody}}


def create_app(
    engine: AsyncEngine, names: Sequence[str], args: ServerArgs | None = None, answer_format: AnswerFormat | None = None
) -> FastAPI:
    """Create the application for a started engine. The caller must shut the engine down.

    Args:
        names: names of the model in the API. Responses contain the first name. With the entry ``*``, the model also
            serves requests with any other name. If ``*`` is the only entry, responses contain the model's own name.
        args: settings of the server; None for the defaults.
        answer_format: format in which the model writes tool calls and reasoning. Without it, outputs are plain text.

    Raises:
        ConfigError: the settings about LoRA adapters are inconsistent, or ``--lora-dir`` is not a folder.
    """
    args = args or ServerArgs()
    workers = Workers()
    parameters = ParameterPolicy(strict=args.strict_params)
    served = served_model(engine, names, args, answer_format or AnswerFormat(), workers, parameters)
    return app_of(SingleModel(served), args)


def app_of(models: ModelProvider, args: ServerArgs, discover: Discover | None = None) -> FastAPI:
    """Create the application for one or several models. The caller must shut the models down.

    Args:
        discover: function that finds models added after the server started. Without it, clients cannot load or unload
            models.

    Raises:
        ConfigError: the settings about LoRA adapters are inconsistent, or ``--lora-dir`` is not a folder.
    """
    # No redirects, because they would go to the host in the request's Host header. No documentation pages of FastAPI,
    # because they load scripts from other servers.
    app = FastAPI(
        title="metal-engine",
        version=__version__,
        responses=_ERRORS,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = StrictJSONRoute
    install_error_handlers(app)
    app.state.models, app.state.workers = models, models.workers
    lifecycle = app.state.lifecycle = Lifecycle(models.cut_requests, models.workers)
    metrics = ServerMetrics(models)
    runner = ResponseRunner(models, args.sse_keep_alive)
    add_openai_routes(app, runner)
    add_response_routes(app, models, runner, ResponseStore(args.max_stored_responses), lifecycle, metrics)
    add_anthropic_routes(app, models, runner)
    add_ollama_routes(app, models, runner)
    add_pooling_routes(app, models)
    add_tokenization_routes(app, models)
    add_model_routes(app, models, discover)
    if isinstance(models, SingleModel):
        _add_lora(app, models.served, args)
    add_status_routes(app, models, lifecycle, metrics)
    add_docs(app, models)
    add_page(app, models, lifecycle, args.sse_keep_alive)
    if isinstance(models, MultiModel):
        app.add_middleware(models.leasing)
    _add_gates(app, args, lifecycle, metrics)
    return app


def _add_lora(app: FastAPI, served: ServedModel, args: ServerArgs) -> None:
    """Check the settings about LoRA adapters. With ``--lora-dir``, add the routes that load and unload adapters.

    Raises ConfigError as :func:`app_of`.
    """
    adapters = served.engine.adapters
    if adapters is not None and (taken := [name for name in served.names if adapters.find(name)]):
        raise ConfigError(LORA_MODULES, f"contains {taken[0]!r}, which is also a name of the model")
    if args.lora_dir is None:
        return
    folder = existing_folder("--lora-dir", args.lora_dir)
    if adapters is None:
        raise ConfigError("--lora-dir", "needs --enable-lora")
    add_lora_routes(app, served, folder)


def _add_gates(app: FastAPI, args: ServerArgs, lifecycle: Lifecycle, metrics: ServerMetrics) -> None:
    # The middleware that is added last processes a request first.
    app.add_middleware(limit_body, max_bytes=args.max_body_size, read_seconds=args.timeout_read)
    app.add_middleware(own_origins_only, args=args, guarded_paths=(WATCH,))
    if args.api_key:
        app.add_middleware(require_api_key, api_keys=args.api_key)
    if args.allowed_origins:
        # CORS preflight requests of browsers have no key, so this middleware runs before the check of the key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(args.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", GENERATION_ID],
        )
    if checks_hosts(args):
        app.add_middleware(allow_hosts, args=args)
    app.add_middleware(only_probes_if_spare)
    app.add_middleware(lifecycle.middleware)
    app.add_middleware(observe, metrics=metrics)
