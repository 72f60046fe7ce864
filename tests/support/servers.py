"""Live servers on fake runners, one of each kind per session. Each test must leave them idle.

Imports servers and clients only when a test uses a server, because every test process imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.serving import Served


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
    yield _hash_server
    _hash_server.wait_until_idle()


@pytest.fixture
def echoing(_echo_server: Served) -> Iterator[Served]:
    """Yield a server that repeats the tokens of the prompt, then generates EOS."""
    yield _echo_server
    _echo_server.wait_until_idle()
