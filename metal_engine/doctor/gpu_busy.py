"""Share of time in which a Mac's GPU is busy, as the driver reports it in the I/O registry (no root needed)."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COMMAND = ("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
_UTILIZATION = re.compile(r'"Device Utilization %"=(\d+)')
_INTERVAL = 0.25  # seconds between two samples


def utilization_of(registry: str) -> int | None:
    """Return the highest utilization in the output of ``ioreg``, in percent. None if the output lacks a utilization."""
    return max(map(int, _UTILIZATION.findall(registry)), default=None)


class BusySamples:
    """Samples of the GPU's utilization in percent, taken in a thread."""

    def __init__(self) -> None:
        self.percent: list[int] = []

    @property
    def median(self) -> float | None:
        """Median of the samples in percent; None without samples."""
        return float(statistics.median(self.percent)) if self.percent else None

    def sample(self) -> bool:
        """Add a sample. Return False if the driver reports no utilization."""
        try:
            done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=5)
        except (OSError, subprocess.SubprocessError):
            return False
        if (percent := utilization_of(done.stdout)) is None:
            return False
        self.percent.append(percent)
        return True


@contextmanager
def busy_samples() -> Iterator[BusySamples]:
    """Take samples while the context is open. On systems other than macOS, no samples are taken."""
    samples, end = BusySamples(), threading.Event()

    def run() -> None:
        while not end.wait(_INTERVAL) and samples.sample():
            pass

    thread = threading.Thread(target=run, daemon=True)
    if sys.platform == "darwin":
        thread.start()
    try:
        yield samples
    finally:
        end.set()
        if thread.is_alive():
            thread.join(timeout=10)
