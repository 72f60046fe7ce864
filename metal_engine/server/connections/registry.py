"""Tracks connections, and selects the connection to close when there are too many."""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import Protocol

from metal_engine.server.connections.limits import ConnectionLimits

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_WARN_SECONDS = 60.0
# Grace period for a new client's first bytes, even if other clients wait for a connection place. Without it, the
# connections of a burst would evict each other.
_GRACE_SECONDS = 0.1


def _now() -> float:
    return asyncio.get_running_loop().time()


class Closable(Protocol):
    """Interface that the registry needs from a connection."""

    is_spare: bool

    def evict(self) -> None:
        """Close the connection at once, because another connection needs its place."""

    def check_time(self, now: float) -> None:
        """Close the connection if the client has exceeded a time limit. ``now`` is a time of the event loop's clock."""


class Connections:
    """All connections of a server. Must be used in the event loop's thread.

    A connection *waits* while its client has to send the rest of a request, or the next request. If all places are
    taken, a new connection replaces the connection that has waited longest. If no connection waits, a few spare places
    accept new connections for ``/health`` and ``/ready`` only.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[Closable] = set()
        self._num_spare = 0
        # Start times of waiting, in ascending order.
        self._waiting: dict[Closable, float] = {}
        self._spare_waiting: dict[Closable, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._warned = -inf

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Closable) -> bool:
        """Add a new connection. If all places are taken, evict the connection that has waited longest.

        If no connection waits, the new connection gets a spare place, and ``is_spare`` becomes True. If all spare
        places are taken, too, the spare connection that has waited longest is evicted.

        Returns False, without adding the connection, if no place is free and no connection has waited for
        ``_GRACE_SECONDS``. The caller must then try again later.
        """
        if len(self._open) - self._num_spare >= self._limits.max_connections:
            connection.is_spare = not self._waiting
            if connection.is_spare:
                self._warn()
            has_spare_slot = connection.is_spare and self._num_spare < self._limits.num_spare
            if not has_spare_slot and not self._evict(self._spare_waiting if connection.is_spare else self._waiting):
                return False
            self._num_spare += connection.is_spare
        self._open.add(connection)
        self.wait_for(connection)
        if self._timer is None:
            self._schedule()
        return True

    def remove(self, connection: Closable) -> None:
        """Remove a connection that has been closed. Removing it again has no effect."""
        if connection in self._open:
            self._open.discard(connection)
            self._num_spare -= connection.is_spare
            self.request_received(connection)

    def wait_for(self, connection: Closable) -> None:
        """Record that the client has to send the rest of a request, or the next one. The connection may be evicted."""
        if connection in self._open:
            (self._spare_waiting if connection.is_spare else self._waiting).setdefault(connection, _now())

    def request_received(self, connection: Closable) -> None:
        """Record that the client has sent a whole request. The connection is not evicted until :meth:`wait_for`."""
        (self._spare_waiting if connection.is_spare else self._waiting).pop(connection, None)

    def evict_oldest(self) -> bool:
        """Close the connection that has waited longest.

        Returns False if no connection has waited for the grace period of ``_GRACE_SECONDS``.
        """
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
            logger.warning("%d connections are busy (setting max-connections): new ones are rejected", len(self))

    # --- time limits ---

    def _schedule(self) -> None:
        # At most half of the shortest of these limits, so that short limits in tests work too.
        shortest = min(self._limits.read_seconds, self._limits.write_seconds, self._limits.spare_seconds)
        self._timer = asyncio.get_running_loop().call_later(min(_SWEEP_SECONDS, shortest / 2), self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = _now()
        for connection in list(self._open):
            connection.check_time(now)
        if self._open:
            self._schedule()
