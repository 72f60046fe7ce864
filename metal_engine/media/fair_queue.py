"""Fair queue for a resource that serves few requests at a time: :class:`FairQueue`."""

from __future__ import annotations

import bisect
import itertools
import threading

from metal_engine.cancellation import check_cancelled

# Interval at which a waiting request checks for cancellation.
_POLL_SECONDS = 0.02


class FairQueue:
    """Queue that gives the next turn to the waiting request that has used the least time. Thread-safe.

    A new request does not start at 0 seconds, but at the least time of the waiting requests that have had a turn.
    Without waiting requests, the start is the time of the request with the latest turn. At equal times, the request
    that came first gets the turn. New requests therefore cannot delay another request forever.

    Args:
        num_at_once: maximum number of concurrent turns.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_free = num_at_once
        # Used time, order of arrival, and True for requests without an earlier turn; sorted.
        self._waiting: list[tuple[float, int, bool]] = []
        self._begun = 0.0  # time of the request with the latest turn
        self._arrivals = itertools.count()
        self._changed = threading.Condition()

    def begin(self, time: float | None) -> float:
        """Wait for a turn.

        Args:
            time: result of the request's first call plus the seconds used since then; None in the first call.

        Returns:
            ``time``, or the start value of a new request, in seconds.

        Raises:
            Cancelled: the request was cancelled.
        """
        with self._changed:
            is_new = time is None
            if time is None:
                time = next((other for other, _, is_new in self._waiting if not is_new), self._begun)
            own = (time, next(self._arrivals), is_new)
            bisect.insort(self._waiting, own)
            try:
                while not self._num_free or self._waiting[0] != own:
                    check_cancelled()
                    self._changed.wait(_POLL_SECONDS)
                self._num_free -= 1
                self._begun = time
                return time
            finally:
                self._waiting.remove(own)
                self._changed.notify_all()

    def end(self) -> None:
        """End a turn."""
        with self._changed:
            self._num_free += 1
            self._changed.notify_all()

    def is_over(self, time: float) -> bool:
        """Return True if a waiting request has used less than ``time``, so that the caller should end its turn."""
        with self._changed:
            return bool(self._waiting) and self._waiting[0][0] < time
