"""Configuration of all tests: loads the BLAS first, then provides the demo model's path once per session."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from metal_engine.device.blas.load import load_optimized_blas
from metal_engine.device.kernel_folder import use_private_kernel_folder
from tests.support.compiler import use_precompiled_header

# Parallel test processes share the cores, and more BLAS threads than cores are slower than one thread.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# Before any test module imports MLX.
load_optimized_blas()
# Child processes of tests use this folder too, so an empty cache in a test does not cause recompilation.
if sys.platform == "linux":
    use_private_kernel_folder()
    use_precompiled_header()

# Fixtures: responses in the background, the demo model, and live servers. Tests in processes of their own.
pytest_plugins = [f"tests.support.{name}" for name in ("background", "demo", "own_process", "servers")]

# Tests make thousands of HTTP clients. Each would read a file of certificates, which takes 27 ms of CPU time.
for package in ("httpx", "httpx2"):
    with suppress(ImportError):  # some versions of the official clients use httpx2
        transport = importlib.import_module(f"{package}._transports.default")
        transport.create_ssl_context = cache(transport.create_ssl_context)

TESTS = Path(__file__).parent

# No test depends on the clock.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restore logging after a test, because commands in the tests' process configure it."""
    root, ours = logging.getLogger(), logging.getLogger("metal_engine")
    before = root.level, ours.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    ours.setLevel(before[1])
    root.handlers[:] = before[2]


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """Return the path of the demo model's GGUF file. Downloads the file on a cache miss."""
    from metal_engine.checkpoints.demo import fetch_demo_model

    return fetch_demo_model()


# The slowest files, slowest first. Started last, a slow file would delay the end of the run.
LONG_FILES = (
    "tools/fake_gpu/test_dispatch.py",
    "distributed/test_equal_outputs.py",
    "engine/process/test_supervisor.py",
    "test_end_to_end.py",
    "server/test_both_ways.py",
    "cli/test_readme.py",
    "cli/test_docs.py",
    "engine/test_failed_steps.py",
    "runner/test_head_drafter.py",
    "engine/test_replay.py",
    "server/test_lifecycle.py",
    "distributed/test_lost_ranks.py",
    "model_pool/test_models_in_processes.py",
    "engine/test_recurrent.py",
    "engine/test_golden.py",
    "models/test_architectures.py",
    "server/page/test_browser_images.py",
    "server/page/test_browser.py",
    "attention/test_metal_kernel.py",
    "cli/test_serve_multi_model.py",
    "doctor/test_full.py",
    "tools/test_kernel_tools.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove tests marked `metal` on machines without Metal. Sort slow files first and keep the order of others."""
    import mlx.core as mx

    if not mx.metal.is_available():
        items[:] = [item for item in items if item.get_closest_marker("metal") is None]
    places = {TESTS / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: the summary is missing from the log of a run that is stopped."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        last = report.longreprtext.strip().rpartition("\n")[2]
        print(f"\nfailed: {report.nodeid}: {last[:300]}", flush=True)


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection, which would scan them again and again."""
    gc.collect()
    gc.freeze()
