"""Detects an engine's process that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

# The thread wakes this many times within the shortest limit.
_PARTS = 20


class HangMonitor:
    """Reports a hang if the engine's process has made no progress for longer than a limit.

    A thread waits in short intervals and counts them. The time therefore does not advance while this process, the
    server, is stopped.

    Args:
        on_hang: callback that ends the process. The monitor's thread calls it with a description of the hang.
        least_seconds: shortest limit that will be set, in seconds.
    """

    def __init__(self, on_hang: Callable[[str], None], least_seconds: float) -> None:
        self._on_hang = on_hang
        self._part = least_seconds / _PARTS
        # Guards the two attributes below.
        self._lock = threading.Lock()
        self._limit: tuple[float, str] | None = None
        self._seconds = 0.0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._count, name="engine-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def set_limit(self, seconds: float, hang: str) -> None:
        """Report a hang once if ``seconds`` pass from now on without progress. Replaces the previous limit.

        Args:
            hang: description of the hang, without the time.
        """
        with self._lock:
            self._seconds = 0.0
            self._limit = seconds, hang

    def clear_limit(self) -> None:
        """Report no hang until the next limit is set."""
        with self._lock:
            self._limit = None

    def progressed(self) -> None:
        """Record progress of the process. The limit counts from now on."""
        with self._lock:
            self._seconds = 0.0

    def _count(self) -> None:
        while not self._is_closed.wait(self._part):
            with self._lock:
                self._seconds += self._part
                limit = self._limit
                if limit is None or self._seconds <= limit[0]:
                    continue
                self._limit = None
            seconds, hang = limit
            self._on_hang(f"{hang} for {seconds:.3g} s")
