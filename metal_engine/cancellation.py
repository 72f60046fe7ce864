"""Work in a thread whose asker has left: long work looks now and then whether anybody still waits for it."""

from __future__ import annotations

import threading
from contextvars import ContextVar


class Cancelled(Exception):
    """Nobody waits for the work any more."""


# Set while work runs for somebody who may leave; ``asyncio.to_thread`` and ``Context.run`` hand it on to threads.
caller_disconnected: ContextVar[threading.Event | None] = ContextVar("caller_disconnected", default=None)


def is_cancelled() -> bool:
    """Whether whoever asked for the work under way has left."""
    left = caller_disconnected.get()
    return left is not None and left.is_set()


def check_cancelled() -> None:
    """Raise :class:`Cancelled` if whoever asked for the work under way has left."""
    if is_cancelled():
        raise Cancelled
