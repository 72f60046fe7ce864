"""Settings of the allocator: steps reuse freed memory, and a call returns it to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from metal_engine.device.allocator import VARIABLES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
# A thread allocates first as steps do, and then as a large body does. Prints the page faults of the steps after the
# first, and the resident bytes of the body before and after memory is returned.
PROGRAM = """
import ctypes, os, resource, threading
from pathlib import Path
from metal_engine.device.allocator import give_back_freed_memory, keep_freed_memory

keep_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step():
    blocks = [bytearray(size << 20) for size in (3, 5, 20)]
    return sum(map(len, blocks))

def work():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    give_back_freed_memory()
    before = resident()
    parts = [bytearray(4_000) for _ in range(12_000)]
    del parts
    print(resident() - before)
    give_back_freed_memory()
    print(resident() - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def run(variables: dict[str, str]) -> list[int]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_steps_reuse_freed_memory_and_a_call_returns_the_rest_to_the_system() -> None:
    num_faults, kept, left = run({})
    assert num_faults < 100
    assert kept > 40 << 20
    assert left < 2 << 20


def test_settings_in_the_environment_stay() -> None:
    """Each block of at least 1 MiB is mapped and faulted in again: 28 MiB per step."""
    num_faults, _, left = run({"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)})
    assert num_faults > 10 * (28 << 20) // 4096 // 2
    assert left > 40 << 20
