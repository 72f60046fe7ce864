"""Chooses how many drafts are worth their cost, from measured step times and acceptance rates.

A step of n rows takes T(n) seconds. Each request that samples yields one token plus its accepted drafts. The number of
drafts maximizes expected tokens / T(n). If an additional row costs as much as it yields, no drafts are used.

All requests in a step wait for the time that drafts add, even requests that have no drafts and gain nothing. The added
time is therefore weighted more if the step has other requests.

A recurrent state cannot return to the last accepted draft. If a draft is rejected, the next step recomputes the
accepted drafts and the rows before them. The cost of this is added to T(n).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Drafts with a lower acceptance probability are not considered, whatever they cost.
MIN_GAIN = 0.05
# Minimum weight of a new measurement, and number of measured steps after which the weight of an old
# measurement has halved.
_STEP_WEIGHT = 0.25
_HALF_LIFE = 512
# Maximum ratio of a measured time to the average in :func:`averaged`.
_MAX_RATIO = 1.5
# Steps of up to this many rows are tried without a measurement of a similar size.
_ALWAYS_TRIED = 8
# Extra weight of the step time that drafts add, scaled by the fraction of the step's requests that do not own the
# drafts. Without it, requests with half of their drafts accepted would make a batch of sixteen requests 3% slower.
_OTHERS_WEIGHT = 0.75


def averaged(average: float, seconds: float, weight: float, max_ratio: float) -> float:
    """Return a moving average of durations after a new measurement.

    The measurement counts as at most ``max_ratio`` times the average, because other load may have delayed the work.
    """
    return average + weight * (min(seconds, max_ratio * average) - average)


@dataclass(slots=True)
class _Size:
    """Measured duration of steps of one size class.

    Attributes:
        seconds: duration of a step.
        last: number of the last measured step of this size.
        is_sure: True after a second measurement: the first step may have compiled kernels.
    """

    seconds: float
    last: int
    is_sure: bool = False


class StepTimes:
    """Durations of steps that only decode, by number of rows including drafts.

    The older the measurement of a size, the closer its estimate is to the time of a step without drafts. A size that
    looked too slow is therefore tried again, about once in a thousand steps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._num_measured = 0
        self._started = 0.0
        self._num_rows = 0

    def start(self) -> None:
        """Start timing a step. Called when its planning starts."""
        self._started = self._clock()
        self._num_rows = 0

    def planned(self, num_rows: int) -> None:
        """Record that the step decodes ``num_rows`` rows; 0 if it also prefills, so that it is not measured."""
        self._num_rows = num_rows

    def end(self, drafting_seconds: float = 0.0) -> float:
        """Record the end of the step. Return its duration in seconds.

        Args:
            drafting_seconds: part of the duration in which the draft model or head computed drafts, in seconds. The
                measurement excludes this part.
        """
        num_rows, self._num_rows = self._num_rows, 0
        seconds = self._clock() - self._started
        if num_rows:
            self.measured(num_rows, seconds - drafting_seconds)
        return seconds

    def measured(self, num_rows: int, seconds: float) -> None:
        """Record the duration of a step of ``num_rows`` rows."""
        size, seconds = size_class_of_rows(num_rows), max(seconds, 1e-9)
        self._num_measured += 1
        known = self._sizes.get(size)
        if known is None:
            self._sizes[size] = _Size(seconds, self._num_measured)
            return
        if not known.is_sure:
            known.seconds, known.is_sure = min(known.seconds, seconds), True
        else:
            weight = max(_STEP_WEIGHT, 1 - self._remembered(known))
            known.seconds = averaged(known.seconds, seconds, weight, _MAX_RATIO)
        known.last = self._num_measured

    def _remembered(self, size: _Size) -> float:
        return float(0.5 ** ((self._num_measured - size.last) / _HALF_LIFE))

    def times(self, num_rows: int, most: int) -> list[float]:
        """Return the durations in seconds of steps of ``num_rows``, ``num_rows + 1``, ... ``num_rows + most`` rows.

        The result is empty if no step of ``num_rows`` rows or fewer has been measured twice. Durations between measured
        sizes are interpolated linearly. Sizes slightly above the largest measured size get the time of the largest
        size, so that they are tried. The result leaves out larger sizes, and has a single entry if ``num_rows`` is far
        above all measured sizes.
        """
        known = sorted((size, entry) for size, entry in self._sizes.items() if entry.is_sure)
        above = bisect_right(known, num_rows, key=lambda pair: pair[0])
        if not above:
            return []
        size, entry = known[above - 1]
        base = entry.seconds
        if above < len(known):
            next_size, following = known[above]
            base += max(0.0, following.seconds - base) * (num_rows - size) / (next_size - size)
        times = [base]
        for size, entry in known[above:]:
            seconds = base + max(0.0, entry.seconds - base) * self._remembered(entry)
            missing = size - num_rows + 1 - len(times)
            slope = max(0.0, seconds - times[-1]) / missing
            times += [times[-1] + slope * (i + 1) for i in range(missing)]
        largest = known[-1][0]
        num_untried = max(_ALWAYS_TRIED, largest * 5 // 4) - max(num_rows, largest)
        return (times + [times[-1]] * num_untried)[: most + 1]


def size_class_of_rows(num_rows: int) -> int:
    """Return the size class of a step: the number of rows, rounded down to 4 significant bits."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift


def least_gain(num_sampling: int, times: Sequence[float], draft_seconds: float = 0.0) -> float:
    """Return the smallest acceptance probability at which some number of drafts is worth its cost.

    Return infinity if ``times`` covers no drafts.

    Args:
        num_sampling: number of tokens that the step yields without drafts.
        times: result of :meth:`StepTimes.times`.
        draft_seconds: time to find one draft per request before the step, in seconds.
    """
    weight = 1.0 if draft_seconds else time_weight(max(1, num_sampling))
    costs = [
        (weight * (seconds - times[0]) - (-num_drafts // num_sampling) * draft_seconds) / num_drafts
        for num_drafts, seconds in enumerate(times[1:], start=1)
    ]
    if not costs:
        return math.inf
    return max(MIN_GAIN, num_sampling * min(costs) / times[0])


def time_weight(num_sampling: int) -> float:
    """Return the weight of the time that draft rows add to a step of ``num_sampling`` requests."""
    return 1 + _OTHERS_WEIGHT * (1 - 1 / num_sampling)


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """Number of drafts for each request of a step.

    Attributes:
        lengths: number of drafts of each request.
        tokens: expected number of tokens that the step yields.
        seconds: duration of the step, plus the expected time that rejected drafts add to the next step.
    """

    lengths: list[int]
    tokens: float
    seconds: float


def choose_lengths(
    acceptances: Sequence[float],
    limits: Sequence[int],
    num_sampling: int,
    times: Sequence[float],
    draft_seconds: float = 0.0,
    *,
    num_again: Sequence[int] | None = None,
    chances: Sequence[float] | None = None,
    catching_up: Sequence[float] | None = None,
    are_computed: Sequence[bool] | None = None,
) -> DraftLengths:
    """Return how many drafts each request should have.

    Args:
        acceptances: probability that the next draft of a request is accepted, for each request.
        limits: number of available drafts, for each request.
        num_sampling: number of tokens that the step yields without drafts.
        times: result of :meth:`StepTimes.times`, indexed by the step's number of drafts, up to the maximum number.
        draft_seconds: time to find one draft per request before the step, in seconds.
        num_again: number of rows that the next step recomputes if a draft is rejected, beside the accepted drafts, for
            each request. None if nothing is recomputed.
        chances: probability that the tokens before a request's drafts are right, for each request. None means 1.
        catching_up: additional seconds that a request's first draft costs, for each request. None means 0.
        are_computed: True for requests whose drafts take ``draft_seconds``. None means all requests.
    """
    chances = chances or [1.0] * len(limits)
    # Draft j is accepted only if all earlier drafts of its request are. Sorting by gain keeps a request's drafts in
    # order.
    gains = sorted(
        (
            (chance * p ** (j + 1), -i)
            for i, (chance, p, limit) in enumerate(zip(chances, acceptances, limits, strict=True))
            for j in range(limit)
        ),
        reverse=True,
    )
    lengths = [0] * len(limits)
    tokens = best_tokens = float(num_sampling)
    # A draft model drafts for all requests.
    drafts_for_all = draft_seconds and (are_computed is None or any(are_computed))
    weight = 1.0 if drafts_for_all else time_weight(num_sampling)
    best_seconds = best_weighed = times[0]
    num_taken, num_rows_again, longest, before = 0, 0.0, 0, 0.0
    for num_drafts, ((gain, negative), seconds) in enumerate(zip(gains, times[1:], strict=False), start=1):
        if gain < MIN_GAIN:
            break
        i = -negative
        tokens += gain
        if num_again is not None:
            # If this is the first rejected draft, the drafts before it are recomputed.
            p = acceptances[i]
            num_rows_again += chances[i] * p ** lengths[i] * (1 - p) * (num_again[i] + lengths[i])
            seconds += _cost(times, num_rows_again)
        before += catching_up[i] if catching_up is not None and not lengths[i] else 0.0
        lengths[i] += 1
        if are_computed is None or are_computed[i]:
            longest = max(longest, lengths[i])
        seconds += longest * draft_seconds + before
        weighed = seconds + (weight - 1) * (times[num_drafts] - times[0])
        if tokens * best_weighed > best_tokens * weighed:
            best_tokens, best_seconds, best_weighed, num_taken = tokens, seconds, weighed, num_drafts
    chosen = [0] * len(limits)
    for _, negative in gains[:num_taken]:
        chosen[-negative] += 1
    return DraftLengths(chosen, best_tokens, best_seconds)


def _cost(times: Sequence[float], num_rows: float) -> float:
    """Return how much longer a step takes with ``num_rows`` more rows. ``num_rows`` is an expected value."""
    most = len(times) - 1
    if num_rows >= most:
        return (times[most] - times[0]) * num_rows / most
    below = int(num_rows)
    return times[below] + (times[below + 1] - times[below]) * (num_rows - below) - times[0]
