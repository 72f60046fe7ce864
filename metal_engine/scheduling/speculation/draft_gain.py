"""Compares the tokens per second of steps with and without the drafts of a draft head.

Drafts are chosen by estimated step times and acceptances. The estimates can be wrong, for example if the host is slower
than the device. Therefore the real rates of both kinds of steps are measured, for each size class of the number of
requests. If steps with drafts have yielded fewer tokens per second, drafts pause for some steps. Then a burst of 8
steps with drafts is measured again. Each burst that is too slow doubles the next pause, from 32 steps to 512. If the
rate without drafts is unknown or old, drafts pause for 8 steps to measure it::

    drafts  | burst | 8 steps without | burst, too slow | 32 steps without | burst, too slow | 64 steps without | ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from metal_engine.scheduling.speculation.step_times import averaged, size_class_of_rows
from metal_engine.step import UNKNOWN_DRAFT, SchedulerOutput

# Weight of a step in the rates: they average over about 16 steps.
_WEIGHT = 1 / 16
# Maximum ratio of a step's time to the average (:func:`averaged`).
_MAX_RATIO = 2.0
# Number of steps with drafts that are measured before they are compared.
_BURST = 8
# Lengths of pauses in steps: to measure the rate without drafts, and after bursts that were too slow.
_MEASURING_PAUSE, _FIRST_PAUSE, _LONGEST_PAUSE = 8, 32, 512
# After this number of bursts without a pause, the rate without drafts is measured again.
_MAX_BURSTS = 128


@dataclass(slots=True)
class _Rate:
    """Moving averages of the number of tokens and of the duration of steps of one kind; 0 before the first step."""

    tokens: float = 0.0
    seconds: float = 0.0

    def measured(self, num_tokens: int, seconds: float) -> None:
        if not self.seconds:
            self.tokens, self.seconds = num_tokens, seconds
            return
        self.tokens += _WEIGHT * (num_tokens - self.tokens)
        self.seconds = averaged(self.seconds, seconds, _WEIGHT, _MAX_RATIO)


@dataclass(slots=True)
class _Rates:
    """Rates of steps with similar numbers of requests.

    Attributes:
        num_plain: number of steps without drafts since the last step with drafts.
        num_drafted: number of steps with drafts in the current burst.
        num_bursts: number of bursts since the last step without drafts.
        pause: number of steps without drafts before the next burst.
    """

    plain: _Rate = field(default_factory=_Rate)
    drafted: _Rate = field(default_factory=_Rate)
    num_plain: int = 0
    num_drafted: int = 0
    num_bursts: int = 0
    pause: int = 0

    def measured_plain(self, num_tokens: int, seconds: float) -> None:
        """Record a step without drafts that yielded ``num_tokens`` tokens. Resets the count of bursts."""
        self.plain.measured(num_tokens, seconds)
        self.num_plain += 1
        self.num_bursts = 0

    def measured_drafted(self, num_tokens: int, seconds: float) -> None:
        """Record a step with drafts. The last step of a burst decides whether drafts pause."""
        self.drafted.measured(num_tokens, seconds)
        self.num_plain = 0
        self.num_drafted += 1
        if self.num_drafted < _BURST:
            return
        self.num_drafted = 0
        self.num_bursts += 1
        is_unknown = not self.plain.seconds or self.num_bursts >= _MAX_BURSTS
        is_slower = self.drafted.tokens * self.plain.seconds < self.plain.tokens * self.drafted.seconds
        if is_slower:
            self.pause = min(max(2 * self.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        else:
            self.pause = _MEASURING_PAUSE if is_unknown else 0


class DraftGain:
    """Measured rates, with and without drafts, of steps that only decode.

    The duration of a step is the time from the end of the previous step to the end of the step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sizes: dict[int, _Rates] = {}
        self._planned: dict[int, tuple[int, bool]] = {}  # step id -> number of requests, and whether it has drafts
        self._last_end: float | None = None

    def may_draft(self, num_requests: int) -> bool:
        """Return False if drafts pause in steps of ``num_requests`` requests."""
        rates = self._sizes.get(size_class_of_rows(num_requests))
        return rates is None or rates.num_drafted > 0 or rates.num_plain >= rates.pause

    def planned(self, plan: SchedulerOutput, num_requests: int, *, waited: bool = False) -> None:
        """Record a plan that only decodes. Steps that are not recorded are not measured.

        Args:
            plan: plan, after its drafts were added. If it has drafts, and all are lookups, the step is not measured.
            num_requests: number of requests in the step.
            waited: True if the plan waited for tokens because drafts were expected. The wait counts as a cost of
                drafts, even if the plan has no drafts.
        """
        drafts = plan.scheduled_spec_decode_tokens.values()
        has_drafts = any(one[0] == UNKNOWN_DRAFT for one in drafts)
        if has_drafts or not drafts:
            self._planned[plan.step_id] = num_requests, has_drafts or waited

    def ended(self, step_id: int, num_tokens: int) -> None:
        """Record the end of a step, which has yielded ``num_tokens`` tokens."""
        now, before = self._clock(), self._last_end
        self._last_end = now
        planned = self._planned.pop(step_id, None)
        if planned is None or before is None or not num_tokens:
            return
        num_requests, has_drafts = planned
        rates = self._sizes.setdefault(size_class_of_rows(num_requests), _Rates())
        (rates.measured_drafted if has_drafts else rates.measured_plain)(num_tokens, now - before)

    def failed(self) -> None:
        """Discard the steps in flight. The interval around their ends is not measured."""
        self._planned.clear()
        self._last_end = None


class UnmeasuredGain(DraftGain):
    """Replacement for :class:`DraftGain` without a draft head: drafts never pause, and nothing is measured."""

    def may_draft(self, num_requests: int) -> bool:
        return True

    def planned(self, plan: SchedulerOutput, num_requests: int, *, waited: bool = False) -> None:
        pass

    def ended(self, step_id: int, num_tokens: int) -> None:
        pass
