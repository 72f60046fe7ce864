"""Memory that was freed is given back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from metal_engine.device.allocator import VARIABLES

ROOT = Path(__file__).parents[2]
KEPT = """
import os, sys, threading
from pathlib import Path
from metal_engine.device.allocator import give_back_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def serve():
    bytearray(20 << 20)  # a large body
    before = resident()
    parts = [bytearray(4_000) for _ in range(8_000)]
    del parts
    print(resident() - before)

if sys.argv[1] == "give back":
    give_back_freed_memory()
thread = threading.Thread(target=serve)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
@pytest.mark.parametrize(
    ("argument", "variables", "most"),
    [("give back", {}, 2 << 20), ("keep", {}, None), ("give back", {"MALLOC_TRIM_THRESHOLD_": "90000000"}, None)],
)
def test_a_thread_keeps_little_of_what_it_has_freed(argument: str, variables: dict[str, str], most: int | None) -> None:
    """By itself glibc keeps it all, once a large block has been freed; and where the environment says so."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", KEPT, argument]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    kept = int(done.stdout)
    assert kept > 24 << 20 if most is None else kept < most
