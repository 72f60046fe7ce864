"""Counts the starts that ended in their largest step, and refuses large limits of command buffers after two of them.

macOS ends a command buffer that keeps the GPU busy for too long, which may end the process. MLX reads its limits only
once, so only the next start can use other limits. A file counts the consecutive starts whose largest step did not
finish. A start that finishes its largest step removes the file.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from metal_engine.device.cache_dir import cache_dir
from metal_engine.device.command_buffers import limits_in_force
from metal_engine.settings.config import CommandBufferLimits

logger = logging.getLogger(__name__)

# Number of unfinished starts after which limits are refused. One is allowed: the user may have interrupted it.
MOST_UNFINISHED = 2
# Parts of Metal's names for the errors of a command buffer that takes too long.
_TOO_LONG = ("ImpactingInteractivity", "CallbackErrorTimeout")


def _path(limits: CommandBufferLimits) -> Path:
    """Return the file that counts the unfinished starts with these limits, and with this version of MLX and macOS."""
    facts = repr(limits), metadata.version("mlx"), platform.mac_ver()[0]
    return cache_dir() / "command_buffers" / f"{sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def _num_unfinished(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["unfinished"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def refusal(limits: CommandBufferLimits) -> str | None:
    """Return the reason not to use these limits: the last starts with them ended in their largest step.

    Return None if the limits may be used, or if there is no cache directory.
    """
    with suppress(FileNotFoundError):  # no cache directory
        path = _path(limits)
        if _num_unfinished(path) >= MOST_UNFINISHED:
            starts = f"the last {MOST_UNFINISHED} starts ended in their largest step"
            return f"{starts}; to try larger limits again, remove {path}"
    return None


@contextmanager
def trying_limits() -> Iterator[None]:
    """Count this start as unfinished within the context, in which the caller runs the largest step of a model.

    If the process ends within the context, or a command buffer takes too long there, the start stays counted. Otherwise
    the count is reset to 0. Does nothing if the environment sets no limits of command buffers.
    """
    limits = limits_in_force()
    if limits is None:
        yield
        return
    path: Path | None = None
    try:
        path = _path(limits)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"unfinished": _num_unfinished(path) + 1, "limits": str(limits)}))
    except OSError as error:
        logger.debug("an unfinished start would not be noticed: %s", error)
    took_too_long = False
    try:
        yield
    except Exception as error:
        took_too_long = any(name in str(error) for name in _TOO_LONG)
        raise
    finally:
        if path is not None and not took_too_long:
            with suppress(OSError):  # writing the file failed before, so this start is not counted
                path.unlink(missing_ok=True)
