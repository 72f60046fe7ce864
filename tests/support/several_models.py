"""Several models on fake runners or tiny checkpoints: a registry, and a live server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.device_access import DeviceAccess
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.errors import ModelLoadError
from metal_engine.model_pool.model_entry import LoadedEngine, ModelSource
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.server.app import app_of
from metal_engine.server.connections.limits import connection_limits
from metal_engine.server.generation.model_provider import MultiModel
from metal_engine.server.run import Server
from metal_engine.server.status.registry_routes import Discover
from metal_engine.server.workers import Workers
from metal_engine.settings.config import EngineConfig
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import DEADLINE, forget_endpoints, wait_until
from tools.fixtures.fake_engine import FakeRunner, NextToken, fake_config, generated, hash_chain, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine

TOKENIZER = tiny_tokenizer()
# Shared, because making a client takes longer than most requests here.
CLIENT = httpx.Client(timeout=DEADLINE, limits=httpx.Limits(max_keepalive_connections=0))


def salted(salt: int) -> NextToken:
    """Return a function that generates tokens, which depend on ``salt`` and on all earlier tokens."""
    return lambda tokens, num_prompt_tokens: hash_chain([salt, *tokens], num_prompt_tokens)


@dataclass
class FakeModel:
    """Model of ``num_bytes`` bytes on a fake runner.

    Attributes:
        salt: number on which the output depends.
        step_time: seconds per step.
        runners: runners of all loads so far.
        gate: event that loading waits for; set at first.
        problem: reason why the model cannot be loaded; None if it can be loaded.
        began: event that is set when loading begins.
    """

    salt: int
    num_bytes: int = 100
    step_time: float = 0.0
    config: EngineConfig = field(default_factory=fake_config)
    gate: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None
    runners: list[FakeRunner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def source(self) -> ModelSource:
        """Return a source whose file identity is ``problem``."""
        return ModelSource(self.start, lambda: self.problem)

    def start(self, access: DeviceAccess) -> LoadedEngine:
        def build() -> SteppedEngine:
            self.began.set()
            access.check_wanted()
            access.claim(self.num_bytes)
            while not self.gate.wait(0.005):
                access.check_wanted()
            if self.problem is not None:
                raise ModelLoadError(self.problem)
            runner = FakeRunner(self.config.cache.block_size, salted(self.salt), self.step_time)
            self.runners.append(runner)
            return SteppedEngine(self.config, runner, TOKENIZER)

        engine = AsyncEngine(EngineThread(build))
        engine.start()
        return LoadedEngine(engine, AnswerFormat())


@dataclass
class ServedModels:
    url: str
    registry: ModelRegistry
    loop: asyncio.AbstractEventLoop
    server: Server

    def stop(self) -> Future[None]:
        """Stop the server as a signal does. The future resolves when all requests have ended."""
        return asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop)

    def post(self, path: str, body: object) -> httpx.Response:
        return CLIENT.post(f"{self.url}{path}", json=body)

    def get(self, path: str) -> httpx.Response:
        return CLIENT.get(f"{self.url}{path}")

    def states(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in self.get("/v1/models").json()["data"]}


@contextmanager
def serve_models(
    sources: dict[str, ModelSource],
    memory_bytes: int,
    *,
    keep_alive: float = 0.0,
    args: ServerArgs | None = None,
    prepare: Callable[[ModelRegistry], Awaitable[None]] | None = None,
    discover: Discover | None = None,
) -> Iterator[ServedModels]:
    """Yield a server whose models are loaded on demand. Shuts the server down at the end."""
    args = args or ServerArgs(shutdown_timeout=1)
    registry = ModelRegistry(memory_bytes, keep_alive)
    for name, source in sources.items():
        registry.add(name, source)
    models = MultiModel(registry, args, Workers())
    loops: list[asyncio.AbstractEventLoop] = []
    is_up = threading.Event()
    server = Server(
        app_of(models, args, discover),
        models,
        prepare=None if prepare is None else lambda: prepare(registry),
        shutdown_timeout=args.shutdown_timeout,
        limits=connection_limits(args),
        on_ready=is_up.set,
        host="127.0.0.1",
        port=0,
    )

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
    thread.start()
    try:
        wait_until(lambda: is_up.is_set() or not thread.is_alive(), "the server to start")
        assert server.started
        yield ServedModels(f"http://127.0.0.1:{server.port}", registry, loops[0], server)
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        models.workers.close()
        assert registry.shutdown(DEADLINE)
        forget_endpoints()
        assert not thread.is_alive()


MEMORY_FOR_TWO = 200


class SeveralFakes:
    """Three fake models behind a server that has memory for two."""

    def __init__(self, served: ServedModels, models: dict[str, FakeModel]) -> None:
        self.served, self.models = served, models

    def text(self, name: str, prompt: str, num_tokens: int = 8) -> str:
        """Return the text that a model generates for a raw prompt."""
        return TOKENIZER.decode(generated(TOKENIZER.encode(prompt), num_tokens, salted(self.models[name].salt)))

    def chat_text(self, name: str, content: str, num_tokens: int = 8) -> str:
        prompt = TOKENIZER.apply_chat_template([{"role": "user", "content": content}])
        return TOKENIZER.decode(generated(prompt, num_tokens, salted(self.models[name].salt)))

    def complete(self, name: str, prompt: str, **more: Any) -> httpx.Response:
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        return self.served.post("/v1/completions", body)

    def check(self, name: str, prompt: str) -> None:
        answer = self.complete(name, prompt)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == (name, self.text(name, prompt))

    def wait_until_idle(self) -> None:
        def is_idle() -> bool:
            entries = self.served.registry.entries
            return all(not one.num_leases and one.load is None and one.unloading is None for one in entries)

        wait_until(is_idle, "requests to end")


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line[6:] != "[DONE]"]
