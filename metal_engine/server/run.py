"""Runs the application. Handles its readiness, signals, the engine's death, and the exit status of the process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn.config
import uvicorn.server
from fastapi import FastAPI

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.errors import ConfigError
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.server.app import app_of, create_app
from metal_engine.server.connections.acceptor import Acceptor
from metal_engine.server.connections.connection import Connection
from metal_engine.server.connections.limits import ConnectionLimits
from metal_engine.server.connections.registry import Connections
from metal_engine.server.generation.model_provider import ModelProvider, MultiModel
from metal_engine.server.lifecycle import Lifecycle
from metal_engine.server.listen import Listener
from metal_engine.server.status.registry_routes import Discover
from metal_engine.server.status.stats_log import log_stats
from metal_engine.server.upkeep import run_upkeep
from metal_engine.server.workers import Workers
from metal_engine.settings.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Seconds for which the server still responds after the engine has died. Requests get an error, and /health reports it.
DEATH_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.1
# Seconds from the second signal to the end of the process, even if the event loop is stuck.
_FORCED_EXIT_SECONDS = 2.0
# Seconds that uvicorn waits for connections to close after their requests have ended.
_CONNECTION_SECONDS = 2
# Python's switch interval: a thread that wants the GIL gets it after this time. Python's default is 5 ms. The event
# loop requests the GIL again after each write to a socket, so that a step of 16 streams would wait for 80 ms.
_SWITCH_SECONDS = 0.0005
_ENGINE_STOP_SECONDS = 10.0


class Server(uvicorn.server.Server):
    """uvicorn server that drains on the first signal, stops at once on the second, and ends when its engine dies.

    Args:
        prepare: coroutine function to await before the first connection is accepted. Its exception ends the server.
        shutdown_timeout: seconds that requests in flight may take to finish when the server stops.
        death_grace: seconds for which the server still responds with errors after its engine has died.
        log_stats_interval: seconds between log lines about the engine; 0 for no lines.
        on_ready: function to call once the server accepts connections.
        limits: limits on connections.
        options: options of uvicorn: :attr:`Listener.tls`, and ``host`` and ``port`` if ``run`` gets no sockets.

    Attributes:
        connections: open connections.
        exit_status: exit status for the process.
    """

    def __init__(
        self,
        app: FastAPI,
        models: ModelProvider,
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
        shutdown_timeout: float = 30.0,
        death_grace: float = DEATH_GRACE_SECONDS,
        log_stats_interval: float = 0.0,
        on_ready: Callable[[], None] = lambda: None,
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008  (it is frozen)
        **options: Any,
    ) -> None:
        self.connections = Connections(limits)
        super().__init__(
            uvicorn.config.Config(
                app,
                http=partial(Connection, limits=limits, connections=self.connections),  # type: ignore[arg-type]
                ws="none",
                timeout_keep_alive=limits.keep_alive_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=_CONNECTION_SECONDS,
                log_config=None,  # the command line configures logging for the process
                access_log=False,
                lifespan="off",
                **options,
            )
        )
        self.exit_status = 0
        self._models = models
        self._prepare = prepare
        self._lifecycle: Lifecycle = app.state.lifecycle
        self._shutdown_timeout = shutdown_timeout
        self._death_grace = death_grace
        self._log_stats_interval = log_stats_interval
        self._handshake_seconds = limits.read_seconds
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_signals = 0

    @property
    def port(self) -> int:
        """Port that the server listens on. If port 0 was requested, this is the port that the system chose."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: Any = None) -> None:
        """Start to accept connections, up to a limit, and start the background tasks.

        Replaces uvicorn's own method, which does not limit the number of connections.

        Raises ConfigError if another process has begun to listen on the address. Also raises the exceptions of
        ``prepare``.
        """
        if self._prepare is not None:
            await self._prepare()
        self._loop = asyncio.get_running_loop()
        listening = sockets or [socket.create_server((self.config.host, self.config.port))]
        acceptors = [self._acceptor(one) for one in listening]
        try:
            for acceptor in acceptors:
                acceptor.start(self.config.backlog)
        except OSError as error:
            address = listening[0].getsockname()
            flag, value = ("--uds", address) if isinstance(address, str) else ("--port", address[1])
            raise ConfigError(flag, f"cannot listen on {flag} {value}: {error.strerror}; choose another") from error
        self.servers = cast(list[Any], acceptors)
        self.started = True
        self._spawn(self._watch_engine())
        self._spawn(run_upkeep(self._lifecycle, self._models.workers, self._models.release_memory))
        if self._log_stats_interval:
            self._spawn(log_stats(self._models, self._log_stats_interval))
        self._on_ready()

    def _acceptor(self, listening: socket.socket) -> Acceptor:
        config = self.config

        def connection() -> Connection:
            made = config.http_protocol_class(config=config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]
            return cast(Connection, made)

        return Acceptor(listening, connection, self.connections, config.ssl, self._handshake_seconds)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    # --- the end ---

    async def stop(self) -> None:
        """Let requests in flight finish within the shutdown timeout, then end the server."""
        await self._lifecycle.drain(self._shutdown_timeout)
        self.should_exit = True

    def close_workers(self) -> None:
        """Stop the worker threads, after the server has ended."""
        self._models.workers.close()

    async def stop_now(self) -> None:
        """Abort all requests in flight, then end the server."""
        await self._lifecycle.cut_all()
        self.should_exit = self.force_exit = True

    async def _watch_engine(self) -> None:
        while self._models.error is None:
            await asyncio.sleep(_POLL_SECONDS)
        logger.critical("the engine has died (%r): the server ends", self._models.error)
        self.exit_status = self.exit_status or 1
        await asyncio.sleep(self._death_grace)
        await self._lifecycle.drain(1.0)
        self.should_exit = True

    # --- signals ---

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Within this context, the first SIGINT or SIGTERM calls :meth:`stop`, and the second :meth:`stop_now`.

        A third signal, or a signal before the startup, ends the process at once. Does nothing outside the main thread.
        """
        is_main = threading.current_thread() is threading.main_thread()
        with _handled_by(self._on_signal) if is_main else nullcontext():
            yield

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._loop is None or self._num_signals > 2:  # not started, so there is nothing to drain; or third signal
            os._exit(128 + number)
        if self._num_signals == 1:
            self._loop.call_soon_threadsafe(self._spawn, self.stop())
        else:
            self.exit_status = 128 + number
            watchdog = threading.Timer(_FORCED_EXIT_SECONDS, os._exit, (128 + number,))
            watchdog.daemon = True
            watchdog.start()
            self._loop.call_soon_threadsafe(self._spawn, self.stop_now())


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within this context, ``handler`` handles SIGINT and SIGTERM. The previous handlers are restored at the end."""
    earlier = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)


def quit_on_signals() -> AbstractContextManager[None]:
    """Within this context, SIGINT and SIGTERM end the process at once with status 128 + signal.

    Used while a model loads.

    Python's own KeyboardInterrupt may be lost in a finalizer. A regular exit would tear down MLX while the loading
    thread still uses it.
    """

    def quit_(number: int, _frame: FrameType | None) -> None:
        sys.stderr.flush()
        os._exit(128 + number)

    return _handled_by(quit_)


def run_server(
    engine: AsyncEngine,
    args: ServerArgs,
    names: tuple[str, ...],
    listener: Listener,
    on_ready: Callable[[str], None],
    answer_format: AnswerFormat | None = None,
) -> int:
    """Serve a started engine until a signal arrives or the engine dies. Then shut the engine down.

    Ends the process if the step in flight does not finish in time.

    Args:
        names: names of the model in the API, as for :func:`create_app`.
        on_ready: function to call with the server's URL once it accepts connections.

    Returns:
        Exit status for the process: 0, 1 if the engine died, or 128 + signal after a second signal.

    Raises:
        ConfigError: another process has begun to listen on the address, or :func:`create_app` failed. If
            :func:`create_app` failed, the engine is not shut down.
    """
    app = create_app(engine, names, args, answer_format)
    models: ModelProvider = app.state.models
    server = _server(app, models, args, listener, on_ready)
    return _run(server, listener, engine.shutdown)


def run_registry(
    registry: ModelRegistry,
    args: ServerArgs,
    listener: Listener,
    on_ready: Callable[[str], None],
    prepare: Callable[[], Awaitable[None]],
    discover: Discover | None,
) -> int:
    """Serve several models until a signal arrives, then shut them down.

    The result, the exceptions and the end of the process are as in :func:`run_server`. Also raises the exceptions of
    ``prepare``.

    Args:
        prepare: coroutine function that loads the initial models before the first connection is accepted.
        discover: see :func:`app_of`.
    """
    models = MultiModel(registry, args, Workers())
    server = _server(app_of(models, args, discover), models, args, listener, on_ready, prepare)
    return _run(server, listener, registry.shutdown)


def _server(
    app: FastAPI,
    models: ModelProvider,
    args: ServerArgs,
    listener: Listener,
    on_ready: Callable[[str], None],
    prepare: Callable[[], Awaitable[None]] | None = None,
) -> Server:
    return Server(
        app,
        models,
        prepare=prepare,
        shutdown_timeout=args.shutdown_timeout,
        log_stats_interval=args.log_stats_interval,
        on_ready=lambda: on_ready(listener.url),
        limits=listener.limits,
        **listener.tls,
    )


def _run(server: Server, listener: Listener, shut_down: Callable[[float], bool]) -> int:
    # Everything loaded so far stays in memory. Without `freeze`, the garbage collector would scan it from time to time,
    # holding the GIL for 50 ms.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        server.run(sockets=[listener.socket])
    except Exception:  # raised by `startup`
        server.close_workers()
        shut_down(_ENGINE_STOP_SECONDS)
        raise
    server.close_workers()
    stopped = shut_down(0.5 if server.force_exit else _ENGINE_STOP_SECONDS)
    if not stopped:
        # A regular exit would tear down MLX while the engine thread is still in a step.
        logger.warning("the step in flight has not finished; exiting without it")
        sys.stderr.flush()
        os._exit(server.exit_status)
    return server.exit_status
