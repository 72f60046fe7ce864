"""Accepts connections up to a limit. Connections in the TLS handshake count."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from metal_engine.server.connections.connection import Connection
from metal_engine.server.connections.registry import Connections

logger = logging.getLogger(__name__)

# Maximum number of connections accepted in one call.
_MOST_AT_ONCE = 64
# Seconds until the next attempt to accept: after an error, and at the limit of connections.
_ERROR_SECONDS = 0.2
_FULL_SECONDS = 0.05
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TLS_SHUTDOWN_SECONDS = 5.0


class Acceptor:
    """Accepts connections from a listening socket. Implements the part of :class:`asyncio.Server` that uvicorn uses.

    The servers of asyncio and uvloop limit neither handshakes nor connections. uvloop's server ends when the process
    has no free file descriptor.

    Args:
        listening: bound socket. :meth:`close` closes it.
        make: function that creates a connection.
        connections: registry that admits connections up to a limit.
        tls: TLS context; None without TLS.
        handshake_seconds: time limit for a TLS handshake in seconds.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], Connection],
        connections: Connections,
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
    ) -> None:
        self.sockets = (listening,)
        self._make = make
        self._connections = connections
        self._tls: dict[str, Any] = {}
        if tls is not None:
            seconds = {"ssl_handshake_timeout": handshake_seconds, "ssl_shutdown_timeout": _TLS_SHUTDOWN_SECONDS}
            self._tls = {"ssl": tls, **seconds}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._is_short = False
        self._held: socket.socket | None = None  # accepted socket that waits for a free connection place

    def start(self, backlog: int) -> None:
        """Start to listen, with room for ``backlog`` connections that are not accepted yet.

        Raises:
            OSError: another process has begun to listen on the address.
        """
        (listening,) = self.sockets
        listening.setblocking(False)
        listening.listen(backlog)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and cancel connections whose TLS handshake has not finished."""
        (listening,) = self.sockets
        if self._pause is not None:
            self._pause.cancel()
        if listening.fileno() >= 0:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        if self._held is not None:
            self._held.close()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                accepted = self._held or self.sockets[0].accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._on_error(error)
                return
            self._is_short, self._held = False, None
            accepted.setblocking(False)
            connection = self._make()
            if not self._connections.add(connection):
                self._held = accepted
                self._wait(_FULL_SECONDS)
                return
            task = self._loop.create_task(self._connect(connection, accepted))
            connection.connecting = task
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_connected, connection, accepted))

    def _on_error(self, error: OSError) -> None:
        """Log the error and retry a moment later. If descriptors or memory are short, close an idle connection.

        The new connection stays in the socket's queue.
        """
        if error.errno not in _SHORTAGES:
            logger.error("cannot accept a connection: %s", error)
        else:
            if not self._is_short:
                self._is_short = True
                reason = error.strerror
                logger.error("cannot accept a connection (%s): raise the limit of open files (ulimit -n)", reason)
            self._connections.evict_oldest()
        self._wait(_ERROR_SECONDS)

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self.sockets[0].fileno())
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self.sockets[0].fileno(), self._accept)
        if self._held is not None:
            self._accept()

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        await self._loop.connect_accepted_socket(lambda: connection, accepted, **self._tls)

    def _on_connected(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        connection.connecting = None
        if task.cancelled() or task.exception() is not None:  # disconnected, or the TLS handshake failed
            accepted.close()
            connection.forget()
