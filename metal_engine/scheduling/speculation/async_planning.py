"""Decides whether to plan a step asynchronously, while its predecessor runs, or to wait for the predecessor's tokens.

Applies to ``--async-scheduling``. An asynchronously planned step hides the host's work, but cannot have drafts, because
drafts follow known tokens. A step with drafts is therefore planned when all tokens are known. The planning of the step
after it must wait, too, because the number of accepted drafts is unknown until the step ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from metal_engine.scheduling.speculation.draft_lengths import DraftLengths
from metal_engine.scheduling.speculation.step_times import StepTimes

# Every 256th decision is inverted, so that the other mode is measured again from time to time.
_TRIED_EVERY = 256
# Up to 2 ** _MAX_VAIN_WAITS - 1 waits are left out in a row.
_MAX_VAIN_WAITS = 7


class AsyncPlanning:
    """Durations of asynchronously planned steps that only decode, by number of rows.

    A duration is the time between the end of the previous step and the end of the step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times = StepTimes(clock)
        self._last_end: float | None = None
        self._planned: dict[int, int] = {}  # step id -> rows
        self._num_decisions = 0
        self._num_vain_waits = 0  # number of consecutive waits for steps that then had no drafts
        self._num_left_out = 0  # number of waits left out since the last wait

    def planned(self, step_id: int, num_rows: int) -> None:
        """Record the number of rows of an asynchronously planned step.

        Args:
            num_rows: number of rows if the step only decodes; 0 if it also prefills, so that it is not measured.
        """
        self._planned[step_id] = num_rows

    def ended(self, step_id: int) -> None:
        """Record the end of a step, planned asynchronously or not."""
        now, before = self._clock(), self._last_end
        self._last_end = now
        num_rows = self._planned.pop(step_id, 0)
        # Drop the entries of earlier steps that failed: no end is reported for them.
        self._planned = {planned: rows for planned, rows in self._planned.items() if planned > step_id}
        if num_rows and before is not None:
            self._times.measured(num_rows, now - before)

    def failed(self, step_ids: set[int]) -> None:
        """Discard failed or cancelled steps. The next step that ends is not measured."""
        self._planned = {step_id: rows for step_id, rows in self._planned.items() if step_id not in step_ids}
        self._last_end = None

    def seconds(self, num_rows: int) -> float | None:
        """Return the estimated duration of an asynchronously planned step of ``num_rows`` rows, in seconds.

        None if no step of up to ``num_rows`` rows was measured twice. The first step of a size may compile kernels.
        """
        times = self._times.times(num_rows, 0)
        return times[0] if times else None

    def may_wait(self) -> bool:
        """Return True if a step that is expected to have drafts should wait for tokens.

        The expectation can be wrong for a long time, because it assumes step times that were never measured. Therefore,
        after n waits in a row for steps that then had no drafts, the next 2 ** n - 1 waits are skipped. n is at most
        ``_MAX_VAIN_WAITS``. Call this method once for each step that is expected to have drafts.
        """
        self._num_left_out += 1
        return self._num_left_out >= 1 << self._num_vain_waits

    def waited(self, *, has_drafts: bool) -> None:
        """Record the plan of a step that waited for tokens because drafts were expected."""
        self._num_vain_waits = 0 if has_drafts else min(self._num_vain_waits + 1, _MAX_VAIN_WAITS)
        self._num_left_out = 0

    def is_slower(self, num_rows: float, choice: DraftLengths) -> bool:
        """Return True if an asynchronously planned step yields fewer tokens per second than a step with drafts.

        Every ``_TRIED_EVERY``-th result is inverted, so that both kinds of steps are measured from time to time. False
        while :meth:`seconds` has no estimate for the asynchronous step.

        Args:
            num_rows: average number of rows of asynchronously planned steps, at least 1. Each row yields a token.
            choice: draft lengths of the step with drafts, with its expected tokens and duration.
        """
        seconds = self.seconds(int(num_rows))
        if seconds is None:
            return False  # the engine then plans asynchronously, which measures the duration
        self._num_decisions += 1
        is_slower = choice.tokens * seconds > num_rows * choice.seconds
        return is_slower != (self._num_decisions % _TRIED_EVERY == 0)
