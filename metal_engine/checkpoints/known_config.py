"""Reads configurations of models on this machine, and sets limits that MLX reads when it is loaded.

Does not import MLX. Models that must be downloaded first are not considered.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metal_engine.checkpoints.demo import demo_path
from metal_engine.checkpoints.gguf.config import gguf_config
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.hub.repository import cached_folder
from metal_engine.checkpoints.metadata import read_config
from metal_engine.checkpoints.model_names import DEMO_MODEL, gguf_models, is_gguf, is_local, parse_hub_name
from metal_engine.device.command_buffers import command_buffer_limits, limits_in_force, set_command_buffer_limits
from metal_engine.device.limits_trial import refusal
from metal_engine.errors import one_line
from metal_engine.local_paths import local_path
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.resolve import plans_ahead

logger = logging.getLogger(__name__)


def limit_command_buffers(models: Iterable[EngineArgs]) -> None:
    """Set limits of Metal's command buffers that suit all models which the process will serve.

    Has no effect on systems other than macOS, after MLX was loaded, or if the user or an earlier call has set the
    limits. Draft models do not count, because the host waits for each of their steps.
    """
    if sys.platform != "darwin":
        return
    models = list(models)
    configs = [config for args in models if (config := known_config(args)) is not None]
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allows_queued_dispatch = any(plans_ahead(args, "metal") for args in models)
    wanted = command_buffer_limits(configs, memory_bytes, allows_queued_dispatch=allows_queued_dispatch)
    if limits_in_force() is None and (reason := refusal(wanted)) is not None:
        logger.warning("Metal's command buffers have MLX's own limits: %s", reason)
        return
    set_command_buffer_limits(wanted)
    if (limits := limits_in_force()) is None:
        logger.info("Metal's command buffers have MLX's own limits: MLX has been loaded before")
    else:
        logger.info("Metal's command buffers have %s", limits)


def known_config(args: EngineArgs) -> dict[str, Any] | None:
    """Return the ``config.json`` of a model whose files are on this machine, or its equivalent for a GGUF file.

    Returns None if the model must be downloaded first, or if its files are invalid. Loading the model reports errors in
    the files.
    """
    try:
        path = _path(args)
        if is_gguf(path):
            return gguf_config(read_gguf_header(path))
        return read_config(path)
    except Exception as error:  # noqa: BLE001  (files may have any content, and the hub's client raises any type)
        logger.debug("the configuration of %s is not available: %s", args.model, one_line(error))
        return None


def _path(args: EngineArgs) -> Path:
    """Return the model's folder or GGUF file, which may not exist."""
    if args.model == DEMO_MODEL:
        return demo_path()
    path = local_path(args.model)
    if is_gguf(path) or path.is_dir() or is_local(args.model):
        return path
    name = parse_hub_name(args.model)
    folder = cached_folder(name.repo, name.revision or args.revision, args.download_dir, [])
    if (folder / "config.json").is_file():
        return folder
    # The GGUF models of a repository differ only in quantization, so any of them has the right layers.
    return folder / gguf_models([str(file.relative_to(folder)) for file in folder.rglob("*")])[0].name
