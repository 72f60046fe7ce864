"""Ways to dispatch and replay decode steps, on a Mac's GPU and on the fake GPU: memory, and equal tokens."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from metal_engine.device.command_buffers import MAX_MB, MAX_OPS

# Operations of a command buffer. A step has 24 x 17 kernels, so the limits give 17, 82, 7 and 2 command buffers.
USUAL, *OTHERS = LIMITS = (24, 4, 60, 400)
ONE_BY_ONE = "one by one"
WAYS = {
    ONE_BY_ONE: {"ahead": False, "queued": False, "replay": False},
    "ahead": {"ahead": True, "queued": False, "replay": False},
    "queued": {"ahead": True, "queued": True, "replay": False},
    "replayed": {"ahead": True, "queued": False, "replay": True},
    "queued and replayed": {"ahead": True, "queued": True, "replay": True},
}
# tests/tools/fake_gpu/ runs all ways. The fake GPU computes no numbers, so two ways show that the program runs.
FAKE_WAYS = {name: WAYS[name] for name in (ONE_BY_ONE, "queued and replayed")}

ON_METAL = pytest.mark.metal
EACH_WAY = [*(pytest.param("metal", way, marks=ON_METAL) for way in WAYS), *(("fake", way) for way in FAKE_WAYS)]
EACH_LIMIT = [*(pytest.param("metal", limit, marks=ON_METAL) for limit in LIMITS), ("fake", USUAL)]


@functools.cache
def results(device: str, max_ops: int) -> Any:
    """Return the results of all ways with the usual limit of command buffers, and of one way with another limit."""
    if device == "fake" and (sys.platform != "linux" or platform.machine() != "x86_64"):
        pytest.skip("the fake GPU patches the libmlx of Linux on x86-64")
    ways = {"fake": FAKE_WAYS, "metal": WAYS}[device] if max_ops == USUAL else {ONE_BY_ONE: WAYS[ONE_BY_ONE]}
    command = [sys.executable, "-m", "tests.on_metal.program", json.dumps(ways)]
    limits = {MAX_OPS: str(max_ops), MAX_MB: "4096", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **limits}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("device", "way"), EACH_WAY)
def test_steps_write_in_place_and_give_the_same_tokens(device: str, way: str) -> None:
    found = results(device, USUAL)
    assert found[way]["tokens"] == found[ONE_BY_ONE]["tokens"]
    assert all(len(tokens) >= 12 for tokens in found[way]["tokens"])
    assert found[way]["peak_arrays"] < 1, "a step held a second copy of a cache array"
    assert (found[way]["replayed"] > 0) == WAYS[way]["replay"]


@pytest.mark.metal
@pytest.mark.parametrize("max_ops", OTHERS)
def test_limits_of_command_buffers_do_not_change_results(max_ops: int) -> None:
    assert results("metal", max_ops)[ONE_BY_ONE]["tokens"] == results("metal", USUAL)[ONE_BY_ONE]["tokens"]


@pytest.mark.parametrize(("device", "max_ops"), EACH_LIMIT)
def test_the_check_at_the_start_ends_with_a_reason(device: str, max_ops: int) -> None:
    """Which way is chosen depends on the device. The trial itself must not fail."""
    choice = results(device, max_ops)["choice"]
    assert choice["dispatch"].startswith("each step is ") and "failed" not in choice["dispatch"]
    assert choice["is_queued"] == (":" not in choice["dispatch"]) and choice["refusal"] is None
