"""How many drafts pay: from how long steps take, and from how many of a request's drafts have been accepted.

A step of n rows takes T(n) and gives, of each request that samples, one token and its accepted drafts. As many drafts
are taken as make expected tokens / T(n) largest. Where another row costs as much as it gives, that is none.

What drafts make a step take longer, all requests in it wait for, and answers that have none are not done in fewer steps
for them. So where there are others in the step, that time counts for more than it is.

A recurrent state cannot go back to the last accepted draft. So where one is rejected, the next step computes the
accepted ones again, and the rows before them: what that takes is added to T(n).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Drafts that are less likely to be accepted are not worth a guess at what they cost.
MIN_GAIN = 0.05
# How much a step changes what is known of its size, at least; and after how many steps half of it is forgotten.
_STEP_WEIGHT = 0.25
_HALF_LIFE = 512
# A step that takes so many times as long as it should has been held up by something else.
_HELD_UP = 1.5
# Steps of so many rows are tried right away.
_ALWAYS_TRIED = 8
# How much one draft changes what is expected of its request's next, and of requests that are new.
_DRAFT_WEIGHT = 0.2
_SHARED_WEIGHT = 0.02
_FIRST_GUESS = 0.7
# By how much more the time that drafts take counts, for the share of a step's requests that are others than whose they
# are. Requests that guess right half of the time would make sixteen at once take 3% longer otherwise.
_OTHERS_WEIGHT = 0.75


@dataclass(slots=True)
class _Size:
    """Steps of some size.

    Attributes:
        seconds: that they take.
        last: the measured step, counted from 0, that was the last of this size.
        is_sure: whether there was more than one: the first may have compiled something.
    """

    seconds: float
    last: int
    is_sure: bool = False


class StepTimes:
    """How long steps take that only decode, by their number of rows, drafts included.

    What has not been measured for long counts for less and less beside the time of a step without drafts, so it is
    tried again, about once in a thousand steps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._num_measured = 0
        self._started = 0.0
        self._num_rows = 0

    def start(self) -> None:
        """A step is being planned."""
        self._started = self._clock()
        self._num_rows = 0

    def planned(self, num_rows: int) -> None:
        """The step decodes so many rows, and does nothing else."""
        self._num_rows = num_rows

    def end(self, drafting_seconds: float = 0.0) -> float:
        """The step has ended; returns how long it took.

        Args:
            drafting_seconds: of it, in which a draft model ran.
        """
        num_rows, self._num_rows = self._num_rows, 0
        seconds = self._clock() - self._started
        if num_rows:
            self.measured(num_rows, seconds - drafting_seconds)
        return seconds

    def measured(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows has taken so long."""
        size, seconds = _size(num_rows), max(seconds, 1e-9)
        self._num_measured += 1
        known = self._sizes.get(size)
        if known is None:
            self._sizes[size] = _Size(seconds, self._num_measured)
            return
        if not known.is_sure:
            known.seconds, known.is_sure = min(known.seconds, seconds), True
        else:
            weight = max(_STEP_WEIGHT, 1 - self._remembered(known))
            known.seconds += weight * (min(seconds, _HELD_UP * known.seconds) - known.seconds)
        known.last = self._num_measured

    def _remembered(self, size: _Size) -> float:
        return float(0.5 ** ((self._num_measured - size.last) / _HALF_LIFE))

    def times(self, num_rows: int, most: int) -> list[float]:
        """Returns how long steps of ``num_rows``, ``num_rows + 1``, ... ``num_rows + most`` rows take, in seconds.

        Empty if no step of so few rows has been measured. Sizes in between lie on a line. Somewhat larger ones than any
        are taken to cost nothing more, so they are tried; the list ends with those. It has one time only where all
        steps that have been measured have fewer rows by far.
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


def _size(num_rows: int) -> int:
    """The number of rows, rounded down to 4 binary digits: sizes that are much the same are one."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift


class Acceptance:
    """How likely it is that a request's next draft is accepted, if those before it are."""

    def __init__(self) -> None:
        self._shared = _FIRST_GUESS
        self._of_request: dict[str, float] = {}

    def of(self, request_id: str) -> float:
        return self._of_request.get(request_id, self._shared)

    def tried(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Take in what became of some drafts; those after the first that was rejected say nothing."""
        probability = self.of(request_id)
        for i in range(min(num_drafts, num_accepted + 1)):
            is_right = float(i < num_accepted)
            probability += _DRAFT_WEIGHT * (is_right - probability)
            self._shared += _SHARED_WEIGHT * (is_right - self._shared)
        self._of_request[request_id] = probability

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)


def least_gain(num_sampling: int, times: Sequence[float], draft_seconds: float = 0.0) -> float:
    """Returns how likely drafts must be accepted, at least, for any number of them to pay.

    Args:
        num_sampling: tokens that the step gives without drafts.
        times: of :meth:`StepTimes.times`.
        draft_seconds: what it takes to find one draft of each request, before the step.
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
    """Returns how much the time counts that the rows of drafts make a step of so many requests take longer."""
    return 1 + _OTHERS_WEIGHT * (1 - 1 / num_sampling)


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """How many drafts the requests of a step should have.

    Attributes:
        lengths: of each request.
        tokens: that the step can be expected to give.
        seconds: that it takes, with what rejected drafts make the next one take longer.
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
) -> DraftLengths:
    """Returns how many drafts each request should have.

    Args:
        acceptances: of each request, the probability that its next draft is accepted.
        limits: of each request, how many drafts there are.
        num_sampling: tokens that the step gives without drafts.
        times: of :meth:`StepTimes.times`: without drafts, with one, and so on to the most that the step may
            have.
        draft_seconds: what it takes to find one draft of each request, before the step.
        num_again: of each request, rows of this step that the next one computes again, beside the accepted drafts,
            where a draft is rejected; None if nothing is computed again.
        chances: of each request, the probability that it comes to its drafts at all; None: all do.
        catching_up: of each request, seconds that its first draft takes beside; None: nothing.
    """
    chances = chances or [1.0] * len(limits)
    # The draft after j others is accepted with them: that of a request comes after its earlier ones here.
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
    weight = 1.0 if draft_seconds else time_weight(num_sampling)  # a draft model has drafts of all requests
    best_seconds = best_weighed = times[0]
    num_taken, num_rows_again, longest, before = 0, 0.0, 0, 0.0
    for num_drafts, ((gain, negative), seconds) in enumerate(zip(gains, times[1:], strict=False), start=1):
        if gain < MIN_GAIN:
            break
        i = -negative
        tokens += gain
        if num_again is not None:
            # If this draft is the first that is rejected, those before it are computed again.
            p = acceptances[i]
            num_rows_again += chances[i] * p ** lengths[i] * (1 - p) * (num_again[i] + lengths[i])
            seconds += _cost(times, num_rows_again)
        before += catching_up[i] if catching_up is not None and not lengths[i] else 0.0
        lengths[i] += 1
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
    """Returns how much longer a step takes with so many more rows, on average, than without."""
    most = len(times) - 1
    if num_rows >= most:
        return (times[most] - times[0]) * num_rows / most
    below = int(num_rows)
    return times[below] + (times[below + 1] - times[below]) * (num_rows - below) - times[0]
