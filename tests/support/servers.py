"""Live servers on fake runners and a tiny model, one of each kind per session. Each test must leave them idle.

Imports servers and clients only when a test uses a server, because every test process imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.serving import Served


def servers_of(item: pytest.Item) -> list[Any]:
    return [one for one in (getattr(item, "funcargs", None) or {}).values() if hasattr(type(one), "check_left_idle")]


def pytest_exception_interact(node: pytest.Item) -> None:
    """Do not wait for the servers of a test that has failed: its traceback may hold connections open."""
    for server in servers_of(node):
        server.is_left_idle = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Check that a test leaves the servers of its fixtures idle, after its own fixtures have ended."""
    servers = servers_of(item)
    yield
    for server in servers:
        server.check_left_idle()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Yield a server that generates text without end. Each token depends on all earlier tokens."""
    from tests.support.serving import serve

    with serve() as served:
        yield served


@pytest.fixture(scope="session")
def echoing() -> Iterator[Served]:
    """Yield a server that repeats the tokens of the prompt, then generates EOS."""
    from tests.support.serving import serve
    from tools.fixtures.fake_engine import echo

    with serve(echo) as served:
        yield served


@pytest.fixture(scope="session")
def calling() -> Iterator[Served]:
    """Yield a server whose model thinks, says something and calls two tools: ``tests.support.calling.ANSWER``."""
    from tests.support.calling import ANSWER, answering

    with answering(ANSWER) as served:
        yield served


@pytest.fixture(scope="session")
def tiny() -> Iterator[Served]:
    """Yield a server on a tiny model with random weights, for log probabilities and sampling."""
    from tests.support.serving import serve
    from tests.support.tiny_engine import tiny_engine
    from tools.fixtures.fake_engine import in_thread

    with serve(engine=in_thread(lambda: tiny_engine(num_blocks=512))) as served:
        yield served
