"""Keeps track of connections, and chooses which one is closed when there are too many."""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import Protocol

from metal_engine.server.connections.limits import ConnectionLimits

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_WARN_SECONDS = 60.0
# What the first bytes of a client may take even where others want its place: else a burst would throw itself out.
_GRACE_SECONDS = 0.1


def _now() -> float:
    return asyncio.get_running_loop().time()


class Closable(Protocol):
    """A connection, as far as the registry knows it."""

    is_spare: bool

    def evict(self) -> None:
        """Close at once: another needs the place."""

    def check_time(self, now: float) -> None:
        """Close if the client has let a time limit pass. ``now`` is the event loop's clock."""


class Connections:
    """All connections of a server. Belongs to the event loop.

    A connection *waits* while the server waits for its client: for the rest of a request, or for another one. Where
    there is no room for a new one, the one that has waited longest makes it. Where none waits, there are a few spare
    places, whose connections may ask how the server is and nothing else.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[Closable] = set()
        self._num_spare = 0
        # Since when they wait, the earliest first.
        self._waiting: dict[Closable, float] = {}
        self._spare_waiting: dict[Closable, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._warned = -inf

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Closable) -> bool:
        """Take in a new connection, which may make another go, or may be a spare one; False if there is no room yet."""
        if len(self._open) - self._num_spare >= self._limits.max_connections:
            connection.is_spare = not self._waiting
            if connection.is_spare:
                self._warn()
            has_room = connection.is_spare and self._num_spare < self._limits.num_spare
            if not has_room and not self._evict(self._spare_waiting if connection.is_spare else self._waiting):
                return False
            self._num_spare += connection.is_spare
        self._open.add(connection)
        self.wait_for(connection)
        if self._timer is None:
            self._schedule()
        return True

    def remove(self, connection: Closable) -> None:
        """Forget a connection that has been closed; again does nothing."""
        if connection in self._open:
            self._open.discard(connection)
            self._num_spare -= connection.is_spare
            self.request_received(connection)

    def wait_for(self, connection: Closable) -> None:
        """The server has begun to wait for the connection's client."""
        if connection in self._open:
            (self._spare_waiting if connection.is_spare else self._waiting).setdefault(connection, _now())

    def request_received(self, connection: Closable) -> None:
        """The connection's client has sent what the server waited for."""
        (self._spare_waiting if connection.is_spare else self._waiting).pop(connection, None)

    def evict_oldest(self) -> bool:
        """Close the connection that has waited longest; False if none waits, or only for a moment."""
        return self._evict(self._waiting)

    def _evict(self, waiting: dict[Closable, float]) -> bool:
        oldest = next(iter(waiting), None)
        if oldest is None or _now() - waiting[oldest] < _GRACE_SECONDS:
            return False
        self.remove(oldest)
        oldest.evict()
        return True

    def _warn(self) -> None:
        now = _now()
        if now - self._warned > _WARN_SECONDS:
            self._warned = now
            logger.warning("%d connections are busy (setting max-connections): others are refused", len(self))

    # --- time limits ---

    def _schedule(self) -> None:
        # Far shorter than any limit, so that a test's short limits hold, too.
        shortest = min(self._limits.read_seconds, self._limits.write_seconds, self._limits.spare_seconds)
        self._timer = asyncio.get_running_loop().call_later(min(_SWEEP_SECONDS, shortest / 2), self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = _now()
        for connection in list(self._open):
            connection.check_time(now)
        if self._open:
            self._schedule()
