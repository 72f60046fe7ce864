"""Runs functions of ``on_device`` in processes with the fake GPU, which must be installed before MLX is loaded."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

OnDevice = Callable[..., Any]

COMMAND = [sys.executable, "-m", "tests.tools.fake_gpu.on_device"]
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
# Functions that change classes or modules of their process.
IN_THEIR_OWN_PROCESS = ("order", "tune", "host")


@pytest.fixture(scope="session")
def device_process() -> Iterator[subprocess.Popen[str]]:
    """Process that runs the calls of all tests. The start of the process takes longer than most calls."""
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT}
    )
    yield process
    process.communicate()


@pytest.fixture(scope="session")
def results() -> dict[tuple[str, str], Any]:
    """Results of calls that several tests make."""
    return {}


@pytest.fixture
def on_device(request: pytest.FixtureRequest, results: dict[tuple[str, str], Any]) -> OnDevice:
    """Return ``on_device(name, **arguments)``: the result of a function of ``on_device.py``."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the fake GPU patches the libmlx of Linux on x86-64")

    def call_alone(name: str, arguments: str) -> Any:
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run([*COMMAND, name, arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def call(name: str, arguments: str) -> Any:
        process = request.getfixturevalue("device_process")
        process.stdin.write(f'["{name}", {arguments}]\n')
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the process with the fake GPU has ended"
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["result"]

    def on_device(name: str, **arguments: Any) -> Any:
        key = name, json.dumps(arguments, sort_keys=True)
        if key not in results:
            results[key] = (call_alone if name in IN_THEIR_OWN_PROCESS else call)(*key)
        return results[key]

    return on_device
