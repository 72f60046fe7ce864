"""Cooperative cancellation: work in a thread checks periodically whether its client has disconnected."""

from __future__ import annotations

import threading
from contextvars import ContextVar


class Cancelled(Exception):
    """The client of the work has disconnected."""


# Event that is set when the client of the current work disconnects; None if the work has no client.
# ``asyncio.to_thread`` and ``Context.run`` pass the variable to threads.
caller_disconnected: ContextVar[threading.Event | None] = ContextVar("caller_disconnected", default=None)


def is_cancelled() -> bool:
    """Return True if the client of the current work has disconnected."""
    left = caller_disconnected.get()
    return left is not None and left.is_set()


def check_cancelled() -> None:
    """Raise :class:`Cancelled` if the client of the current work has disconnected."""
    if is_cancelled():
        raise Cancelled
