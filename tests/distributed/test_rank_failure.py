"""End of a process that learns of a lost rank while its interpreter exits."""

from __future__ import annotations

import subprocess
import sys

import pytest

# From Python 3.12 on, no thread can start while the interpreter exits. The test simulates that on all versions.
PROGRAM = """
import atexit, sys, threading
from metal_engine.distributed.rank_failure import RankFailureMonitor

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def at_the_end():
    if "no threads" in sys.argv:
        threading.Thread.start = refuse
    if "lost" in sys.argv:
        watch.lose("rank 1 has gone")

watch = RankFailureMonitor(0, 0.1)
atexit.register(watch.exit_if_rank_lost)
atexit.register(at_the_end)
"""


@pytest.mark.parametrize(("argv", "status"), [([], 0), (["lost"], 1), (["lost", "no threads"], 1)], ids=str)
def test_a_process_exits_with_status_1_if_a_rank_is_lost_during_exit(argv: list[str], status: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert ("rank 1 has gone: rank 0 ends" in done.stderr) == bool(status)
    assert "Traceback" not in done.stderr
