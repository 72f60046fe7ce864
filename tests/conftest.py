"""Shared by all tests: the BLAS goes first, then the demo model's path, once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metal_engine.platform.blas import load_optimized_blas

# Test processes side by side share the cores: more BLAS threads than cores are slower than one.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# Before any test module imports MLX.
load_optimized_blas()


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo model's GGUF file, fetched if it is not in the cache."""
    from metal_engine.models.demo import fetch_demo_model

    return fetch_demo_model()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `metal` run by themselves where there is Metal, and are not collected elsewhere."""
    import mlx.core as mx

    if not mx.metal.is_available():
        items[:] = [item for item in items if item.get_closest_marker("metal") is None]
