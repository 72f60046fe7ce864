"""Runs functions of ``on_device`` in processes with the fake GPU, which must be installed before MLX is loaded."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

OnDevice = Callable[..., Any]


@functools.cache
def _run(name: str, arguments: str) -> Any:
    command = [sys.executable, "-m", "tests.tools.fake_gpu.on_device", name, arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def on_device() -> OnDevice:
    """Return ``on_device(name, **arguments)``: the result of a function of ``on_device.py`` in its own process."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the fake GPU patches the libmlx of Linux on x86-64")
    return lambda name, **arguments: _run(name, json.dumps(arguments, sort_keys=True))
