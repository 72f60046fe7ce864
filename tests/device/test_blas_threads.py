"""Tests that the BLAS uses the cores that other programs leave free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metal_engine.device.blas.threads import BlasThreads, busy_seconds, cpu_seconds

ROOT = Path(__file__).parents[2]


class Load:
    """Seconds on the clock, of all programs on the cores, and of this process."""

    def __init__(self) -> None:
        self.clock = self.busy = self.own = 0.0
        self.set: list[int] = []

    def threads(self, most: int) -> BlasThreads:
        return BlasThreads(most, self.set.append, lambda: self.busy, lambda: self.own, lambda: self.clock)

    def go_on(self, own: float, others: float) -> None:
        """Advance the clock by one second: this process uses ``own`` cores and other programs use ``others`` cores."""
        self.clock, self.busy, self.own = self.clock + 1, self.busy + own + others, self.own + own


@pytest.mark.parametrize(
    ("most", "others", "threads"), [(2, 0.0, 2), (2, 0.4, 2), (2, 0.6, 1), (2, 2.0, 1), (8, 0.4, 8), (8, 3.2, 5)]
)
def test_other_programs_get_their_cores(most: int, others: float, threads: int) -> None:
    load = Load()
    blas = load.threads(most)
    load.go_on(most - others, others)
    blas.adapt()
    assert blas.threads == threads
    assert load.set == [threads] * (threads != most)


def test_blas_thread_count_rises_again_when_cores_become_free() -> None:
    load = Load()
    blas = load.threads(2)
    for own, others in ((1.0, 1.0), (1.0, 1.0), (1.0, 0.0), (2.0, 0.0)):
        load.go_on(own, others)
        blas.adapt()
    assert load.set == [1, 2]


def test_adapt_without_elapsed_time_keeps_the_thread_count() -> None:
    blas = Load().threads(2)
    blas.adapt()
    assert blas.threads == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_busy_seconds(tmp_path: Path) -> None:
    """Counts only this process's cores, without the time of idling, waiting and low-priority programs."""
    core = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu  1 1 1 1 1 1 1 1 0 0\ncpu{core} 100 7000 200 9000 9000 300 400 500 0 0\ncpu9999 9 9 9 9 9 9 9 9\n"
    )
    assert busy_seconds(stat) == 1500 / os.sysconf("SC_CLK_TCK") and busy_seconds() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_seconds() -> None:
    """The server of an engine's process may be any process, with any name."""
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert cpu_seconds(ended.pid) == 0.0


PROGRAM = """
import ctypes, json
from metal_engine.device.blas.load import blas_in_use, load_optimized_blas
from metal_engine.device.blas.threads import blas_threads

before = blas_threads()  # the BLAS is not loaded yet
threads = load_optimized_blas().threads
blas = blas_threads()
if blas is not None:
    blas._set_threads(1)
set_to = ctypes.CDLL(blas_in_use()).openblas_get_num_threads()
print(json.dumps([before is None, threads, blas and blas.threads, set_to]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("variable", [None, "OPENBLAS_NUM_THREADS"])
def test_the_library_in_use(variable: str | None) -> None:
    """:func:`blas_threads` adapts the thread count of OpenBLAS unless an environment variable sets the count."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if variable is not None:
        environment[variable] = "2"
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    is_none, threads, adapted, set_to = json.loads(done.stdout)
    assert is_none and threads >= 2
    assert (adapted, set_to) == ((threads, 1) if variable is None else (None, threads))
