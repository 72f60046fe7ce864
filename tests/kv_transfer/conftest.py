"""Fixtures: engines that share KV through one directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_engine.text.tokenizer import Tokenizer
from tests.support.kv_engines import KVEngine, MakeEngine, kv_engine
from tools.fixtures.fake_engine import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[MakeEngine]:
    """Create engines that share one directory, unless they get a store."""
    engines: list[KVEngine] = []

    def make(store: Any = None, **settings: Any) -> KVEngine:
        engines.append(kv_engine(tokenizer, store or tmp_path / "kv", **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.core.close()
