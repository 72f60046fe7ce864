"""Whether a step is planned ahead, while the one before it runs, or waits for the tokens of that one.

With ``--async-scheduling``, a step that is planned ahead hides what the host does, and has no drafts: they follow
tokens that are known. One that has drafts is planned when all tokens are known, and the next one when its own are,
since nobody knows before how many of the drafts are accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from metal_engine.scheduling.speculation.draft_lengths import DraftLengths, StepTimes

# One decision of so many is the other one, so that what has not been measured for long is measured again.
_TRIED_EVERY = 256


class AsyncStepTimes:
    """How long steps take that are planned ahead and only decode, by their number of rows: from end to end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times = StepTimes(clock)
        self._last_end: float | None = None
        self._planned: dict[int, int] = {}  # step id -> rows
        self._num_decisions = 0

    def planned(self, step_id: int, num_rows: int) -> None:
        """A step was planned ahead that decodes so many rows, and does nothing else."""
        self._planned[step_id] = num_rows

    def ended(self, step_id: int) -> None:
        """A step has ended, planned ahead or not."""
        now, before = self._clock(), self._last_end
        self._last_end = now
        num_rows = self._planned.pop(step_id, 0)
        # Those of steps that failed are not waited for.
        self._planned = {planned: rows for planned, rows in self._planned.items() if planned > step_id}
        if num_rows and before is not None:
            self._times.measured(num_rows, now - before)

    def failed(self, step_ids: set[int]) -> None:
        """Some steps have failed, or will not be run: no time from the end before them to the next one is measured."""
        self._planned = {step_id: rows for step_id, rows in self._planned.items() if step_id not in step_ids}
        self._last_end = None

    def seconds(self, num_rows: int) -> float | None:
        """Returns how long a step of so many rows takes; None if none of so few has been measured."""
        times = self._times.times(num_rows, 0)
        return times[0] if times else None

    def is_slower(self, num_rows: float, choice: DraftLengths) -> bool:
        """Returns whether a step with drafts gives more tokens a second than one that is planned ahead.

        Args:
            num_rows: of steps ahead on average, 1 at least; each row gives a token.
            choice: of the step with drafts.
        """
        seconds = self.seconds(int(num_rows))
        if seconds is None:
            return False  # it is to be measured
        self._num_decisions += 1
        is_slower = choice.tokens * seconds > num_rows * choice.seconds
        return is_slower != (self._num_decisions % _TRIED_EVERY == 0)
