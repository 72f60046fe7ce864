"""A live server on a tiny model with real logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.engine_thread import EngineThread
from tests.support.serving import Served, serve
from tests.support.tiny_engine import tiny_engine


@pytest.fixture(scope="module")
def _tiny() -> Iterator[Served]:
    engine = AsyncEngine(EngineThread(lambda: tiny_engine(num_blocks=512)))
    engine.start()
    with serve(engine=engine) as served:
        yield served


@pytest.fixture
def tiny(_tiny: Served) -> Iterator[Served]:
    yield _tiny
    _tiny.wait_until_idle()
