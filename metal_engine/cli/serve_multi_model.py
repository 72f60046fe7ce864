"""``serve`` with several models: a registry that loads models on demand."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from metal_engine.cli.engine_launch import engine_of, spawner_of
from metal_engine.cli.models_dir import models_in
from metal_engine.engine.device_access import DeviceAccess
from metal_engine.engine.process.spawner import Spawner
from metal_engine.errors import InsufficientMemoryError
from metal_engine.local_paths import local_path
from metal_engine.model_pool.model_entry import LoadedEngine, ModelSource, Start
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.server.listen import Listener
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.multi_model import RegistryArgs, models_memory, per_model_args
from metal_engine.settings.pool_size import pool_flag
from metal_engine.settings.server_args import ServerArgs

logger = logging.getLogger(__name__)


def serve_several(
    models: tuple[str, ...],
    found: dict[str, Path],
    args: EngineArgs,
    server_args: ServerArgs,
    registry_args: RegistryArgs,
    listener: Listener,
) -> int:
    """Serve models until a signal arrives. Return the exit status for the process.

    Args:
        found: models of ``--models-dir`` by name, from :func:`find_several`, which has checked the settings.

    Raises:
        ConfigError: settings are invalid or conflict.
        ModelLoadError: a named model cannot be loaded.
    """
    all_args = [replace(args, model=name) for name in (*models, *map(str, found.values()))]
    spawner = spawner_of(all_args, server_args, is_shared=True)
    spawner.prepare_spare()

    from metal_engine.cli.banner import print_banner, registry_rows
    from metal_engine.server.run import run_registry

    device = spawner.device()
    memory_bytes = models_memory(args, registry_args, device)
    each = per_model_args(args, memory_bytes, device)
    registry = ModelRegistry(memory_bytes, registry_args.keep_alive)
    for name in models:
        registry.add(name, source_of(replace(each, model=name), server_args, spawner))
    for name, path in found.items():
        if name not in registry.names:
            registry.add(name, source_of(replace(each, model=str(path)), server_args, spawner))

    def discover(name: str) -> ModelSource | None:
        folder = registry_args.models_dir
        there = {} if folder is None else models_in(Path(folder), warns=False)
        return source_of(replace(each, model=str(there[name])), server_args, spawner) if name in there else None

    return run_registry(
        registry,
        server_args,
        listener,
        on_ready=lambda url: print_banner(registry_rows(registry, url)),
        prepare=lambda: load_named(registry, models, pool_flag(each)),
        discover=discover if registry_args.enable_model_loading else None,
    )


def source_of(args: EngineArgs, server_args: ServerArgs, spawner: Spawner) -> ModelSource:
    """Return a source that loads a model with these settings in a new process, and detects changes of its files."""
    return ModelSource(_starter(args, server_args, spawner), lambda: files_signature(Path(args.model)))


def files_signature(path: Path) -> object:
    """Return a value that changes if files of a model change: names, sizes and times of the files at ``path``.

    Return None if the path cannot be read, as for a repository on the hub.
    """
    path = local_path(path)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError:
        return None


def _starter(args: EngineArgs, server_args: ServerArgs, spawner: Spawner) -> Start:

    def start(access: DeviceAccess) -> LoadedEngine:
        from metal_engine.checkpoints.answer_formats import find_answer_format
        from metal_engine.engine.async_engine import AsyncEngine

        engine = AsyncEngine(engine_of(args, spawner, access))
        engine.start()
        try:
            format_ = find_answer_format(
                engine.tokenizer.hf_tokenizer,
                server_args.tool_call_parser,
                server_args.reasoning_parser,
                model_type=engine.config.model.model_type,
            )
        except BaseException:
            engine.shutdown(None)
            raise
        return LoadedEngine(engine, format_)

    return start


async def load_named(registry: ModelRegistry, names: tuple[str, ...], kv_flag: str = "--kv-cache-memory-bytes") -> None:
    """Load the named models, in order, without unloading any.

    A model that does not fit into free memory is skipped with a warning. Its first request loads it.

    Args:
        kv_flag: flag that sets the size of the KV caches, for the warning.

    Raises:
        ModelLoadError: a model cannot be loaded for another reason.
    """
    for name in names:
        entry = registry.find(name)
        assert entry is not None
        try:
            await registry.load(entry, may_evict=False)
        except InsufficientMemoryError as error:
            change = f"to load it at the start, raise --models-memory or lower {kv_flag}"
            logger.warning("%s; it is loaded on its first request; %s", error, change)
        await asyncio.sleep(0)
