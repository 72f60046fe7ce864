"""Live servers on fake runners, one of each kind for the session; each test must leave them clean.

Loads servers and clients only where a test asks for one: every test process loads this module.
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
    """Generates text that depends on every token before it, without end."""
    yield _hash_server
    _hash_server.settle()


@pytest.fixture
def echoing(_echo_server: Served) -> Iterator[Served]:
    """Generates the prompt's tokens again, then EOS."""
    yield _echo_server
    _echo_server.settle()
