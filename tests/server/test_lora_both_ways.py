"""Tests of LoRA adapters that run once more with an engine in a process of its own, which holds the adapters."""
# ruff: noqa: F401, F811

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_engine.settings.server_args import ServerArgs
from tests.server.test_lora import (
    answers,
    check_growth,
    root,
    test_load_inplace_replaces_an_adapter_with_all_slots_in_use,
    test_loading_and_unloading,
    test_unloading_while_requests_run,
)
from tests.support.engine_child import started
from tests.support.serving import Served, serve


@pytest.fixture
def served(root: Path) -> Iterator[Served]:
    """Yield a server with adapter a and a slot for one more adapter."""
    engine = started("adapted", folder=str(root / "a"), max_loras=2)
    with serve(engine=engine, names=("base",), args=ServerArgs(lora_dir=str(root), shutdown_timeout=1)) as served:
        yield served


@pytest.mark.full
def test_adapters_of_an_engine_process_leak_no_resources(served: Served, answers: dict[str, str], root: Path) -> None:
    check_growth(served, answers, root, 40)
