"""When a store that failed may be asked again: a dead store costs a deadline once, not with every request."""

from __future__ import annotations

from collections.abc import Callable

_FIRST_REST_SECONDS = 1.0
_LONGEST_REST_SECONDS = 30.0


class StoreRest:
    """Doubles the pause with every failure, until the store works again. Thread-safe: a race costs one more attempt.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0
        self._next_rest = _FIRST_REST_SECONDS

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    def succeeded(self) -> None:
        self._next_rest = _FIRST_REST_SECONDS

    def failed(self) -> None:
        self._until = self._clock() + self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST_SECONDS)
