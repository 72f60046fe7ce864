"""Adapts the number of OpenBLAS threads to the CPU use of other programs (Linux)."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from metal_engine.device.blas.dynamic_linker import symbol_address
from metal_engine.device.blas.load import blas_in_use

logger = logging.getLogger(__name__)

_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Fields of a line of /proc/stat, in clock ticks: user, system, irq, softirq and steal. Programs with a positive nice
# value (field 1) yield to this process.
_BUSY_FIELDS = (0, 2, 5, 6, 7)
# Fraction of a core that other programs may use without reducing the number of BLAS threads.
_TOLERATED_FRACTION = 0.5


def busy_seconds(path: Path = Path("/proc/stat")) -> float:
    """Return the sum of the busy seconds since boot of all cores that this process may run on.

    Excludes programs with a positive nice value.

    Args:
        path: file in the format of ``/proc/stat``.
    """
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in path.read_text().splitlines()]
    ticks = sum(int(row[1 + field]) for row in rows if row and row[0] in cores for field in _BUSY_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used so far (Linux). Return 0 if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class BlasThreads:
    """Adapts the number of BLAS threads to the cores that other programs leave free.

    A matrix product completes when its last thread completes, and the finished threads spin. If another program holds
    the core of one thread, all threads wait until the system runs that thread again. If every core is taken, one thread
    is several times faster than many.

    Args:
        most: number of threads if no other program runs.
        set_threads: function that sets the number of threads for later products.
        busy: function that returns the busy seconds of all usable cores so far, as :func:`busy_seconds`.
        own: function that returns the CPU time of this process and its server together, in seconds.
        clock: function that returns the time in seconds.

    Attributes:
        threads: current number of threads.
    """

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], object],
        busy: Callable[[], float] = busy_seconds,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = most
        self._most = most
        self._set_threads = set_threads
        self._busy, self._own, self._clock = busy, own, clock
        self._last = clock(), busy(), own()

    def adapt(self) -> None:
        """Set the number of threads according to the CPU use since the last call. Call this about once a second."""
        before, self._last = self._last, (self._clock(), self._busy(), self._own())
        seconds, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        if seconds <= 0:
            return
        others = max(busy - own, 0.0) / seconds
        threads = max(1, min(self._most, int(self._most - others + _TOLERATED_FRACTION)))
        if threads != self.threads:
            logger.debug("%d BLAS threads: other programs use %.1f cores", threads, others)
            self._set_threads(threads)
            self.threads = threads


def blas_threads(server_pid: int | None = None) -> BlasThreads | None:
    """Return an object that adapts the threads of the BLAS in use, or None if their number must not change.

    Returns None in these cases:

    - The system is not Linux.
    - An environment variable sets the number of threads.
    - The BLAS is not OpenBLAS, or has only one thread.

    Args:
        server_pid: id of the server's process; None if the engine runs in that process. The server's CPU time counts as
            the engine's.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return None
    path = blas_in_use()
    if path is None:
        return None
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    if symbol_address(library, "openblas_set_num_threads") is None:
        return None
    most = library.openblas_get_num_threads()
    if most < 2:
        return None

    def own() -> float:
        return time.process_time() + (0.0 if server_pid is None else cpu_seconds(server_pid))

    return BlasThreads(most, library.openblas_set_num_threads, own=own)
