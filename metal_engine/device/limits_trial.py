"""Counts the starts that ended in their largest step, and refuses large limits of command buffers after two of them.

macOS ends a command buffer that keeps the GPU busy for too long, which may end the process. MLX reads its limits only
once, so only the next start can use other limits. A file counts the consecutive starts whose largest step did not
finish. A start that finishes its largest step removes the file. Each start locks the file during its largest step,
so that ranks and models that start together count as one start.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TextIO

from metal_engine.device.cache_dir import cache_dir
from metal_engine.device.command_buffers import limits_in_force
from metal_engine.device.info import macos_version
from metal_engine.settings.config import CommandBufferLimits

logger = logging.getLogger(__name__)

# Number of unfinished starts after which limits are refused. One is allowed: the user may have interrupted it.
MOST_UNFINISHED = 2
# Parts of Metal's names for the errors of a command buffer that takes too long.
_TOO_LONG = ("ImpactingInteractivity", "CallbackErrorTimeout")


def _path(limits: CommandBufferLimits) -> Path:
    """Return the file that counts the unfinished starts with these limits, and with this version of MLX and macOS."""
    facts = repr(limits), metadata.version("mlx"), macos_version()
    return cache_dir() / "command_buffers" / f"{sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def _num_unfinished(file: TextIO) -> int:
    try:
        file.seek(0)
        return int(json.load(file)["unfinished"])
    except (ValueError, TypeError, KeyError):
        return 0


def _is_running(file: TextIO) -> bool:
    """Return True if a start holds the lock, so that its largest step is counted and may still finish."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def refusal(limits: CommandBufferLimits) -> str | None:
    """Return the reason not to use these limits: the last starts with them ended in their largest step.

    Return None if these limits may be used, or if no cache directory exists to count starts in.
    """
    with suppress(OSError):  # no cache directory, or no such file
        path = _path(limits)
        with path.open(encoding="utf-8") as file:
            if _num_unfinished(file) - _is_running(file) >= MOST_UNFINISHED:
                starts = f"the last {MOST_UNFINISHED} starts ended in their largest step"
                return f"{starts}; to try larger limits again, remove {path}"
    return None


def _count_start(limits: CommandBufferLimits) -> TextIO | None:
    """Count this start as unfinished. Return the file of the count, with a lock that ends with the process.

    Return None if the file cannot be written, or if another start holds the lock.
    """
    try:
        path = _path(limits)
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file = stack.enter_context(path.open("a+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            count = {"unfinished": _num_unfinished(file) + 1, "limits": str(limits)}
            file.truncate(0)
            file.write(json.dumps(count))
            file.flush()
            stack.pop_all()
            return file
    except OSError as error:
        logger.debug("an unfinished start would not be noticed: %s", error)
        return None


@contextmanager
def trying_limits() -> Iterator[None]:
    """Count this start as unfinished within the context, in which the caller runs the largest step of a model.

    If the process ends within the context, or a command buffer takes too long there, the start stays counted. Otherwise
    the count is reset to 0. Does nothing if the environment sets no limits of command buffers, or if another process is
    within the context with the same limits.
    """
    limits = limits_in_force()
    file = None if limits is None else _count_start(limits)
    took_too_long = False
    try:
        yield
    except Exception as error:
        took_too_long = any(name in str(error) for name in _TOO_LONG)
        raise
    finally:
        if file is not None:
            if not took_too_long:
                with suppress(OSError):
                    os.unlink(file.name)
            file.close()
