"""Live server on a fake runner, with real uvicorn, a real engine thread and a real scheduler."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import fastapi.dependencies.models
import httpx
import openai
import uvicorn.server
from fastapi import FastAPI

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.server.app import create_app
from metal_engine.server.connections.limits import connection_limits
from metal_engine.server.listen import tls_options
from metal_engine.server.run import Server
from metal_engine.settings.config import EngineConfig
from metal_engine.settings.server_args import ServerArgs
from metal_engine.text.tokenizer import Tokenizer
from tools.fixtures.fake_engine import FakeRunner, NextToken, fake_config, fake_engine, hash_chain
from tools.fixtures.stepped_engine import SteppedEngine

MODEL = "org/fake-model"
DEADLINE = 60.0


class _HastyAsyncio:
    """Replacement of the module asyncio in uvicorn's server, with sleeps that are ten times shorter.

    The server sleeps 0.1 s in each step of its shutdown.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = _HastyAsyncio()  # type: ignore[assignment]


def forget_endpoints() -> None:
    """Clear FastAPI's caches of functions. They keep applications and their engines in memory."""
    for one in vars(fastapi.dependencies.models).values():
        if hasattr(one, "cache_clear"):
            one.cache_clear()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds. Raises AssertionError after ``DEADLINE``, which is long: speed is not under test.

    Args:
        what: text for the error message.
    """
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.002)


@dataclass
class Served:
    url: str
    engine: AsyncEngine
    runner: FakeRunner
    server: Server
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    num_idle_tasks: int
    is_left_idle: bool = True  # whether the server must be idle after a test

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def core(self) -> EngineCore:
        """Return the engine core, which only tests use directly."""
        assert isinstance(self.engine._engine, BuiltEngine | SteppedEngine), "the engine has a process of its own"
        return self.engine._engine.core

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=DEADLINE)

    def check_left_idle(self) -> None:
        """Wait until the server is idle, unless a test has failed, or has ended the server or its engine."""
        if self.is_left_idle and not self.server.should_exit and self.engine.error is None:
            self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until no state of any request is left in the server, the engine or the block pool."""
        assert self.thread.is_alive(), "the server's event loop has ended: see the warning about its exception"
        wait_until(lambda: self.engine.num_open_requests == 0, "open requests")
        if isinstance(self.engine._engine, BuiltEngine | SteppedEngine):
            wait_until(lambda: not self.core.has_requests, "requests in the engine")
            self.core.scheduler.check_integrity()
        wait_until(lambda: self.engine.stats.num_running == 0, "the numbers of an engine in another process")
        wait_until(lambda: len(asyncio.all_tasks(self.loop)) <= self.num_idle_tasks, "tasks of the server")
        stats = self.engine.stats
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert (self.engine.num_waiting, self.engine.num_queued_tokens) == (0, 0)
        assert not self.engine._client._open


@contextmanager
def run_server(
    app: FastAPI, args: ServerArgs, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None, **options: Any
) -> Iterator[tuple[Server, threading.Thread, asyncio.AbstractEventLoop, int]]:
    """Yield a server that a thread runs, the thread, the event loop and its number of tasks while it is idle."""
    started: list[Any] = []
    server = Server(
        app,
        app.state.models,
        shutdown_timeout=args.shutdown_timeout,
        limits=connection_limits(args),
        on_ready=lambda: started.extend((asyncio.get_running_loop(), len(asyncio.all_tasks()))),
        host="127.0.0.1",
        port=0,
        **tls_options(args),
        **options,
    )

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(server.serve())

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        wait_until(lambda: bool(started) or not thread.is_alive(), "the server to start")
        assert server.started
        yield server, thread, *started
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        forget_endpoints()
        assert not thread.is_alive()


@contextmanager
def serve(
    next_token: NextToken = hash_chain,
    *,
    config: EngineConfig | None = None,
    step_time: float = 0.0,
    tokenizer: Tokenizer | None = None,
    names: tuple[str, ...] = (MODEL,),
    args: ServerArgs | None = None,
    death_grace: float = DEADLINE,
    answer_format: AnswerFormat | None = None,
    engine: AsyncEngine | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Iterator[Served]:
    """Yield a server on a fake runner, or on a running ``engine``.

    Shuts the server and the engine down at the end. A server that is not stopped must be idle then.
    """
    config = config or fake_config()
    runner = FakeRunner(config.cache.block_size, next_token, step_time)
    engine = engine or fake_engine(runner, config, tokenizer)
    args = args or ServerArgs(shutdown_timeout=1)
    app = create_app(engine, names, args, answer_format)
    with ExitStack() as stack:
        stack.callback(engine.shutdown)
        server, *running = stack.enter_context(run_server(app, args, loop_factory, death_grace=death_grace))
        stack.callback(runner.running.set)
        served = Served(f"http://127.0.0.1:{server.port}", engine, runner, server, *running)
        yield served
        served.check_left_idle()
