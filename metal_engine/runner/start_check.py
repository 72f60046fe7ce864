"""Time limit of the checks at a start. A feature whose check takes longer is turned off."""

from __future__ import annotations

import time
from collections.abc import Callable

CHECK_SECONDS = 20.0


class CheckTooSlowError(Exception):
    """A check at the start has reached its time limit."""


class CheckDeadline:
    """Time limit of one check. The time starts when the object is created.

    Args:
        seconds: time limit of the check.
        clock: function that returns seconds.
    """

    def __init__(self, seconds: float = CHECK_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._end = clock() + seconds

    def check(self) -> None:
        """Raise CheckTooSlowError if the time limit is exceeded. Call it between the steps of the check."""
        if self._clock() > self._end:
            raise CheckTooSlowError(f"its check takes more than {self._seconds:g} s")
