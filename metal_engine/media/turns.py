"""Turns at a resource that serves few requests at a time."""

from __future__ import annotations

import bisect
import itertools
import threading

from metal_engine.cancellation import check_cancelled

# Interval at which a waiting request checks for cancellation.
_POLL_SECONDS = 0.02


class Turns:
    """Gives the next turn to the waiting request that has used the least time. Thread-safe.

    A request with one small image waits for the running turns, not for the whole work of other requests.

    Args:
        num_at_once: number of turns at a time.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_free = num_at_once
        self._waiting: list[tuple[float, int]] = []  # used time and order of arrival, sorted
        self._arrivals = itertools.count()
        self._changed = threading.Condition()

    def begin(self, used: float) -> None:
        """Wait for a turn.

        Args:
            used: seconds that the request has used in earlier turns.

        Raises:
            Cancelled: the request was cancelled.
        """
        own = (used, next(self._arrivals))
        with self._changed:
            bisect.insort(self._waiting, own)
            try:
                while not self._num_free or self._waiting[0] != own:
                    check_cancelled()
                    self._changed.wait(_POLL_SECONDS)
                self._num_free -= 1
            finally:
                self._waiting.remove(own)
                self._changed.notify_all()

    def end(self) -> None:
        """End a turn."""
        with self._changed:
            self._num_free += 1
            self._changed.notify_all()

    def is_over(self, used: float) -> bool:
        """Return True if a request that has used less time than ``used`` waits for a turn."""
        with self._changed:
            return bool(self._waiting) and self._waiting[0][0] < used
