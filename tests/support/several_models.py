"""Several models on fake runners or tiny checkpoints: a registry, and a live server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.engine.device_access import DeviceAccess
from metal_engine.errors import ModelLoadError
from metal_engine.model_pool.model_entry import LoadedEngine, ModelSource
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.server.app import app_of
from metal_engine.server.generation.model_provider import MultiModel
from metal_engine.server.run import Server
from metal_engine.server.status.registry_routes import Discover
from metal_engine.server.workers import Workers
from metal_engine.settings.config import EngineConfig
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import DEADLINE, run_server, wait_until
from tools.fixtures.fake_engine import (
    FakeRunner,
    NextToken,
    fake_config,
    generated,
    hash_chain,
    in_thread,
    tiny_tokenizer,
)
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

        return LoadedEngine(in_thread(build), AnswerFormat())


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
    args: ServerArgs | None = None,
    discover: Discover | None = None,
) -> Iterator[ServedModels]:
    """Yield a server whose models are loaded on demand. Shuts the server down at the end."""
    args = args or ServerArgs(shutdown_timeout=1)
    registry = ModelRegistry(memory_bytes, keep_alive=0.0)
    for name, source in sources.items():
        registry.add(name, source)
    models = MultiModel(registry, args, Workers())
    try:
        with run_server(app_of(models, args, discover), args) as (server, _, loop, _):
            yield ServedModels(f"http://127.0.0.1:{server.port}", registry, loop, server)
    finally:
        models.workers.close()
        assert registry.shutdown(DEADLINE)


MEMORY_FOR_TWO = 200


class SeveralFakes:
    """Fake models behind a server."""

    def __init__(self, served: ServedModels, models: dict[str, FakeModel]) -> None:
        self.served, self.models, self.is_left_idle = served, models, True

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

    def check_left_idle(self) -> None:
        if self.is_left_idle:
            self.wait_until_idle()


@contextmanager
def serve_fakes(
    names: Sequence[str], memory_bytes: int = MEMORY_FOR_TWO, step_time: float = 0.0
) -> Iterator[SeveralFakes]:
    """Yield fake models with these names behind a server."""
    models = {name: FakeModel(salt, step_time=step_time) for salt, name in enumerate(names)}
    with serve_models({name: one.source for name, one in models.items()}, memory_bytes) as served:
        made = SeveralFakes(served, models)
        yield made
        for one in models.values():
            one.gate.set()
        made.check_left_idle()


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line[6:] != "[DONE]"]
