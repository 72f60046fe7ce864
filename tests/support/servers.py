"""Live servers on fake runners and a tiny model, one of each kind per session. Each test must leave them idle.

Imports servers and clients only when a test uses a server, because every test process imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.serving import Served


def _idle_afterwards(server: Served) -> Iterator[Served]:
    server.check_alive()
    yield server
    server.wait_until_idle()


@pytest.fixture(scope="session")
def _hash_server() -> Iterator[Served]:
    from tests.support.serving import serve

    with serve() as served:
        yield served


@pytest.fixture(scope="session")
def _echo_server() -> Iterator[Served]:
    from tests.support.serving import serve
    from tools.fixtures.fake_engine import echo

    with serve(echo) as served:
        yield served


@pytest.fixture
def served(_hash_server: Served) -> Iterator[Served]:
    """Yield a server that generates text without end. Each token depends on all earlier tokens."""
    yield from _idle_afterwards(_hash_server)


@pytest.fixture
def echoing(_echo_server: Served) -> Iterator[Served]:
    """Yield a server that repeats the tokens of the prompt, then generates EOS."""
    yield from _idle_afterwards(_echo_server)


@pytest.fixture(scope="session")
def _calling_server() -> Iterator[Served]:
    from tests.support.calling import ANSWER, answering

    with answering(ANSWER) as served:
        yield served


@pytest.fixture(scope="session")
def _tiny_server() -> Iterator[Served]:
    from metal_engine.engine.async_engine import AsyncEngine
    from metal_engine.engine.engine_thread import EngineThread
    from tests.support.serving import serve
    from tests.support.tiny_engine import tiny_engine

    engine = AsyncEngine(EngineThread(lambda: tiny_engine(num_blocks=512)))
    engine.start()
    with serve(engine=engine) as served:
        yield served


@pytest.fixture
def calling(_calling_server: Served) -> Iterator[Served]:
    """Yield a server whose model thinks, says something and calls two tools: ``tests.support.calling.ANSWER``."""
    yield from _idle_afterwards(_calling_server)


@pytest.fixture
def tiny(_tiny_server: Served) -> Iterator[Served]:
    """Yield a server on a tiny model with random weights, for log probabilities and sampling."""
    yield from _idle_afterwards(_tiny_server)
