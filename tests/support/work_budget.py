"""Measures a request's work against its size: with any value in any field, work must grow only linearly with the body.

The whole application serves the request in this process on a fake engine, without sockets. Its work is the CPU time of
all threads of the process. C code therefore counts like Python code, for example a scan of a list or an error for each
element. The unit is a *round*: the CPU time of one iteration of an empty Python loop, measured directly before. This
makes slow machines comparable. On a busy machine, the smallest of several measurements counts, because other load only
adds time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from metal_engine.server.app import create_app
from metal_engine.settings.config import PoolerConfig
from metal_engine.settings.server_args import ServerArgs
from tests.support.fillers import FILLERS, Endpoint, with_field
from tests.support.splitting import answer_format
from tools.fixtures.fake_engine import TOOL_TEMPLATE, FakeRunner, fake_config, fake_engine, script, tiny_tokenizer

# The second body has four times the bytes of the first. Both are small for the server, which reads small and large
# bodies in different ways. The third body is large.
GROWTH = 4
_MAX_SMALL_COMMAS = 8_000
_MAX_BYTES = 300_000
# Linear work grows by 4, quadratic work by 16.
MAX_GROWTH = 7.0
# Growth counts from this amount of work. Less work is harmless, and too little to tell growth from noise.
CHEAP_ROUNDS_PER_BYTE = 4.0
# The most expensive legitimate work is tokenizing: 30 to 120, with the template's text around each element.
MAX_ROUNDS_PER_BYTE = 160.0
_CALIBRATION_ROUNDS = 50_000
# Larger than the tokenizer's own vocabulary, as in large models.
VOCAB_SIZE = 151_936


def _seconds_per_round() -> float:
    started = time.thread_time()
    for _ in range(_CALIBRATION_ROUNDS):
        pass
    return (time.thread_time() - started) / _CALIBRATION_ROUNDS


@dataclass(frozen=True)
class Work:
    """Work for a field that was filled at three sizes.

    Attributes:
        rounds: work for each body.
        num_bytes: size of each body.
        statuses: HTTP status of each response.
    """

    rounds: list[float]
    num_bytes: list[int]
    statuses: list[int]

    @property
    def growth(self) -> float:
        """Ratio of the work for the second body to the work for the first."""
        return self.rounds[1] / self.rounds[0]

    @property
    def rounds_per_byte(self) -> list[float]:
        return [rounds / num_bytes for rounds, num_bytes in zip(self.rounds, self.num_bytes, strict=True)]

    @property
    def is_within_budget(self) -> bool:
        if max(self.rounds_per_byte[1:]) > MAX_ROUNDS_PER_BYTE:
            return False
        return self.growth <= MAX_GROWTH or self.rounds_per_byte[1] <= CHEAP_ROUNDS_PER_BYTE


def sizes(make: Callable[[int], bytes]) -> tuple[int, int, int]:
    """Return the approximate sizes of the three bodies in bytes."""
    commas = make(_MAX_BYTES).count(b",")
    small = min(_MAX_BYTES * _MAX_SMALL_COMMAS // max(commas, 1), _MAX_BYTES)
    return small // GROWTH, small, _MAX_BYTES


def filled(endpoint: Endpoint, field: str, filler: str) -> Callable[[int], bytes]:
    """Return a function that makes the endpoint's body with the field filled to a given size."""
    return lambda size: with_field(endpoint, field, FILLERS[filler](size))


class Application:
    """Application on a fake engine, called as a server calls it.

    Args:
        runner: event loop shared by all calls.
    """

    def __init__(self, engine: Any, runner: asyncio.Runner) -> None:
        names = ("tiny", "org/fake-model")
        self._app = create_app(engine, names, ServerArgs(max_body_size=1 << 30), answer_format("json_tools"))
        self._runner = runner

    def post(self, path: str, body: bytes) -> int:
        """Return the status of the response, which must not be 5xx."""
        return self._runner.run(self._post(path, body))

    async def _post(self, path: str, body: bytes) -> int:
        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": headers, "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9),
                 "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"}}  # fmt: skip
        arriving = [{"type": "http.request", "body": body, "more_body": False}]
        statuses: list[int] = []

        async def receive() -> Any:
            if arriving:
                return arriving.pop()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self._app(scope, receive, send)
        (status,) = statuses
        assert status < 500, (path, status, body[:200])
        return status

    def rounds(self, path: str, body: bytes, attempts: int) -> tuple[float, int]:
        """Return the smallest work of ``attempts`` runs of a request in rounds, and the response's status."""
        least = float("inf")
        for _ in range(attempts):
            per_round = min(_seconds_per_round() for _ in range(3))
            started = time.process_time()
            status = self.post(path, body)
            least = min(least, (time.process_time() - started) / per_round)
        return least, status

    def work(self, path: str, make: Callable[[int], bytes], *, attempts: Sequence[int] = (1, 3, 5)) -> Work:
        """Return the work for bodies of three sizes.

        Measures again with more attempts while the result is over the budget.

        Args:
            attempts: number of runs of each request in the first, second, ... measurement. With 0, only the two smaller
                bodies are sent, once.
        """
        bodies = [make(size) for size in sizes(make)]
        for number in attempts:
            measured = [self.rounds(path, body, number or 1) for body in bodies[: None if number else 2]]
            num_bytes = [len(body) for body in bodies[: len(measured)]]
            work = Work([rounds for rounds, _ in measured], num_bytes, [status for _, status in measured])
            if work.is_within_budget:
                break
        return work


@contextmanager
def application() -> Iterator[Application]:
    """Yield an application. Its outputs are short even if a filled field has removed the token limit."""
    config = fake_config(
        max_model_len=4096, num_blocks=1024, vocab_size=VOCAB_SIZE, pooler=PoolerConfig(is_embedder=True)
    )
    runner = FakeRunner(config.cache.block_size, next_token=script("ok"))
    engine = fake_engine(runner, config, tiny_tokenizer(TOOL_TEMPLATE))
    try:
        with asyncio.Runner() as runner:
            yield Application(engine, runner)
    finally:
        engine.shutdown()
