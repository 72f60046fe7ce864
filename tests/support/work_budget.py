"""The work of a request, to be compared with its bytes: whatever a field holds, work grows no faster than the body.

A request is served within this process, without sockets, by the whole application on a fake engine. Its work is the
processor time that all threads of the process take for it, so C code counts like Python's, and a scan of a list or an
error built for each element like a loop. It is told in *rounds*: what one round of an empty Python loop takes, measured
next to it. So a slow machine is no difference, and one that is busy with other things hardly any: of several
measurements the least counts, since what others add is never negative.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from metal_engine.server.app import create_app
from metal_engine.settings.args import ServerArgs
from metal_engine.settings.config import PoolerConfig
from tests.support.fillers import FILLERS, Endpoint, with_field
from tests.support.splitting import answer_format
from tools.fixtures.fake_engine import TOOL_TEMPLATE, FakeRunner, fake_config, fake_engine, script, tiny_tokenizer

# Three bodies: the second has four times the bytes of the first, and both are small to the server, since it reads small
# bodies and large ones in different ways. The third is large.
GROWTH = 4
_MAX_SMALL_COMMAS = 8_000
_MAX_BYTES = 300_000
# Work grows by 4 if it is linear in the bytes, by 16 if it is quadratic.
MAX_GROWTH = 7.0
# Work that grows counts from here on: below, it is too little to tell growth from noise, and harms nobody.
CHEAP_ROUNDS_PER_BYTE = 4.0
# Tokenizing takes most of all that is right: 30 to 120, with what a template writes around each element.
MAX_ROUNDS_PER_BYTE = 160.0
_CALIBRATION_ROUNDS = 50_000
# More than the tokenizer has, as large models do.
VOCAB_SIZE = 151_936


def _seconds_per_round() -> float:
    started = time.thread_time()
    for _ in range(_CALIBRATION_ROUNDS):
        pass
    return (time.thread_time() - started) / _CALIBRATION_ROUNDS


@dataclass(frozen=True)
class Work:
    """What a field took that was filled at three sizes.

    Attributes:
        rounds: of each body.
        num_bytes: of each body.
        statuses: of each answer.
    """

    rounds: list[float]
    num_bytes: list[int]
    statuses: list[int]

    @property
    def growth(self) -> float:
        """How much more work the second body took than the first."""
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
    """About how many bytes the three bodies have."""
    commas = make(_MAX_BYTES).count(b",")
    small = min(_MAX_BYTES * _MAX_SMALL_COMMAS // max(commas, 1), _MAX_BYTES)
    return small // GROWTH, small, _MAX_BYTES


def filled(endpoint: Endpoint, field: str, filler: str) -> Callable[[int], bytes]:
    """Makes the endpoint's body with a field that is filled with so many bytes."""
    return lambda size: with_field(endpoint, field, FILLERS[filler](size))


class Application:
    """The application on a fake engine, called as a server calls it.

    Args:
        runner: the loop that all calls share.
    """

    def __init__(self, engine: Any, runner: asyncio.Runner) -> None:
        names = ("tiny", "org/fake-model")
        self._app = create_app(engine, names, ServerArgs(max_body_size=1 << 30), answer_format("json_tools"))
        self._runner = runner

    def post(self, path: str, body: bytes) -> int:
        """The status of the answer, which must be no 5xx."""
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
        """The work of a request, the least of so many attempts, and its status."""
        least = float("inf")
        for _ in range(attempts):
            per_round = min(_seconds_per_round() for _ in range(3))
            started = time.process_time()
            status = self.post(path, body)
            least = min(least, (time.process_time() - started) / per_round)
        return least, status

    def work(self, path: str, make: Callable[[int], bytes], *, attempts: Sequence[int] = (1, 3, 5)) -> Work:
        """What it takes to answer bodies of three sizes. Measured again, more often, where that is over the budget.

        Args:
            attempts: how often each time; with 0, once, and without the large body.
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
    """An application, until it is left. Its answers are short, also where a filled field has taken the limit away."""
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
