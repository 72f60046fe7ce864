"""Routes about several models: list them, show which are loaded, load and unload them."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI

from metal_engine.model_pool.model_entry import ModelEntry, ModelSource
from metal_engine.server.generation.model_provider import MultiModel, load_errors_as_api_errors
from metal_engine.server.protocol import RequestModel
from metal_engine.server.status.protocol import ModelHealth, RegistryCard, RegistryHealth, RegistryList
from metal_engine.server.workers import Weight

# Searches for a model that was added after the server started. Returns its source or None. Runs in a thread.
Discover = Callable[[str], ModelSource | None]


class LoadBody(RequestModel):
    """Body of ``POST /v1/models/load`` and ``POST /v1/models/unload``."""

    model: str


def add_registry_routes(app: FastAPI, models: MultiModel, created: int) -> None:
    # Probes send HEAD requests.
    @app.get("/v1/models", tags=["models"])
    @app.head("/v1/models", include_in_schema=False)
    async def list_models() -> RegistryList:
        return RegistryList(data=[_card(name, models.entry(name), created) for name in models.names])

    @app.get("/v1/models/{model_id:path}", tags=["models"])
    async def get_model(model_id: str) -> RegistryCard:
        return _card(model_id, models.entry(model_id), created)


def add_loading_routes(app: FastAPI, models: MultiModel, discover: Discover, created: int) -> None:
    """Add the routes ``/v1/models/load`` and ``/v1/models/unload``.

    Args:
        discover: function that finds a model that is not registered. The route then registers and loads the model.
        created: Unix time for the field ``created`` of models.
    """

    @app.post("/v1/models/load", tags=["models"])
    async def load_model(body: LoadBody) -> RegistryCard:
        if models.registry.find(body.model) is None:
            with load_errors_as_api_errors():
                source = await models.workers.run(Weight.LIGHT, discover, body.model)
            if source is not None and models.registry.find(body.model) is None:
                models.registry.add(body.model, source)
        entry = models.entry(body.model)
        await models.load(entry)
        return _card(body.model, entry, created)

    @app.post("/v1/models/unload", tags=["models"])
    async def unload_model(body: LoadBody) -> RegistryCard:
        entry = models.entry(body.model)
        await models.unload(entry)
        return _card(body.model, entry, created)


def _card(name: str, entry: ModelEntry, created: int) -> RegistryCard:
    return RegistryCard(
        id=name,
        created=created,
        root=entry.name,
        max_model_len=entry.max_model_len,
        loaded=entry.loaded_engine is not None,
        state=entry.state.value,
        memory_bytes=entry.num_bytes,
        requests=entry.num_leases,
        idle_seconds=None if entry.loaded_engine is None else round(time.monotonic() - entry.last_used, 1),
        error=entry.error,
    )


def registry_health(
    models: MultiModel, *, draining: bool, unknown: dict[str, int], shows_parameters: bool, shows_models: bool
) -> RegistryHealth:
    """Return the health of all models.

    Args:
        draining: True if the server is shutting down.
        unknown: number of uses of each unknown parameter.
        shows_parameters: True if the client may see the names of unknown parameters.
        shows_models: True if the client may see each model's name and errors, which contain file paths.
    """
    healths = [_health(entry) for entry in models.registry.entries]
    return RegistryHealth(
        status="draining" if draining else "ok",
        running=sum(one.running for one in healths),
        waiting=sum(one.waiting for one in healths),
        kv_cache_usage=max((one.kv_cache_usage for one in healths), default=0.0),
        preemptions=sum(one.preemptions for one in healths),
        failed_steps=sum(one.failed_steps for one in healths),
        unconstrained_calls=sum(one.unconstrained_calls for one in healths),
        num_unknown_parameters=sum(unknown.values()),
        unknown_parameters=unknown if shows_parameters else {},
        memory_bytes=models.registry.budget.memory_bytes,
        used_bytes=sum(one.memory_bytes for one in healths),
        models=healths if shows_models else [],
    )


def _health(entry: ModelEntry) -> ModelHealth:
    health = ModelHealth(
        name=entry.name,
        state=entry.state.value,
        memory_bytes=entry.num_bytes,
        requests=entry.num_leases,
        loads=entry.num_loads,
        error=entry.error,
    )
    if entry.loaded_engine is None:
        return health
    engine = entry.loaded_engine.engine
    stats = engine.stats
    health.running, health.waiting, health.preemptions = stats.num_running, engine.num_waiting, stats.num_preemptions
    health.kv_cache_usage = stats.num_used_blocks / stats.num_blocks
    health.failed_steps, health.attention = engine.metrics.num_failed_steps, engine.config.attention
    health.unconstrained_calls = engine.metrics.num_unconstrained_calls
    health.kv_cache_dtype, health.images = engine.config.model.kv_dtype, engine.config.model.images
    health.restarting = engine.is_restarting
    if entry.failure is not None:
        health.error = f"its engine has stopped: {entry.failure!r}"
    return health
