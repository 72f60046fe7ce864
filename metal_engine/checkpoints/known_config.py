"""Configurations of models that are on this machine, and what has to be set for them before MLX is loaded.

Loads no MLX. A model that has to be fetched first is not known here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metal_engine.checkpoints.checkpoint import read_config
from metal_engine.checkpoints.demo import demo_path
from metal_engine.checkpoints.gguf.config import gguf_config
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.hub import cached_folder
from metal_engine.checkpoints.names import DEMO_MODEL, is_local, parse_hub_name
from metal_engine.device.command_buffers import command_buffer_limits, limits_in_force, set_command_buffer_limits
from metal_engine.errors import one_line
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.resolve import plans_ahead

logger = logging.getLogger(__name__)


def limit_command_buffers(models: Iterable[EngineArgs]) -> None:
    """On a Mac, set what goes into a command buffer, as it suits all models that a process is known to serve.

    It is of no effect where it has been set, by the user or for other models, or where MLX is loaded. Draft models do
    not count: their steps are waited for one by one.
    """
    if sys.platform != "darwin":
        return
    models = list(models)
    configs = [config for args in models if (config := known_config(args)) is not None]
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allows_queued_dispatch = any(plans_ahead(args, "metal") for args in models)
    set_command_buffer_limits(
        command_buffer_limits(configs, memory_bytes, allows_queued_dispatch=allows_queued_dispatch)
    )
    if (limits := limits_in_force()) is None:
        logger.info("Metal's command buffers have MLX's own limits: MLX has been loaded before")
    else:
        logger.info("Metal's command buffers have %s", limits)


def known_config(args: EngineArgs) -> dict[str, Any] | None:
    """``config.json`` of a model, or what a GGUF file says in its place; None where it is not on this machine.

    What is wrong with its files is for whoever loads them to say.
    """
    try:
        path = _path(args)
        if path.suffix == ".gguf":
            return gguf_config(read_gguf_header(path))
        return read_config(path)
    except Exception as error:  # noqa: BLE001  (files may be anything, and the hub's client raises what it likes)
        logger.debug("the configuration of %s is not known: %s", args.model, one_line(error))
        return None


def _path(args: EngineArgs) -> Path:
    """The model's folder, or its GGUF file; it may not be there."""
    if args.model == DEMO_MODEL:
        return demo_path()
    path = Path(args.model).expanduser()
    if path.suffix == ".gguf" or path.is_dir() or is_local(args.model):
        return path
    name = parse_hub_name(args.model)
    folder = cached_folder(name.repo, name.revision or args.revision, args.download_dir, [])
    # All files of a model's quantizations have the same layers.
    return folder if (folder / "config.json").is_file() else next(folder.rglob("*.gguf"))
