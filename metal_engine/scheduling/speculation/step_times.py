"""Measures the durations of decode steps, and estimates them for other numbers of rows."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

# Minimum weight of a new measurement, and number of measured steps after which the weight of an old
# measurement has halved.
_STEP_WEIGHT = 0.25
_HALF_LIFE = 512
# Maximum ratio of a measured time to the average in :func:`averaged`.
_MAX_RATIO = 1.5
# Steps of up to this many rows are tried without a measurement of a similar size.
_ALWAYS_TRIED = 8


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
        last: value of the count of all measured steps at the last measurement of this size.
        is_sure: True after a second measurement: the first step may have compiled kernels.
    """

    seconds: float
    last: int
    is_sure: bool = False


class StepTimes:
    """Durations of steps that only decode, by number of rows including drafts.

    The estimate for a size approaches the time of a step without drafts as its last measurement gets older. A size that
    looked too slow is therefore tried again, about once in a thousand steps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._num_measured = 0
        self._started = 0.0
        self._num_rows = 0

    def start(self) -> None:
        """Start timing a step.

        Called when its planning starts, and with ``--async-scheduling`` also when the previous step has ended.
        """
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
        sizes are interpolated linearly. The time of the largest measured size is repeated for larger sizes, so that
        these are tried: sizes up to a quarter larger, and sizes up to ``_ALWAYS_TRIED`` rows. A result that is not
        empty has at least the entry for ``num_rows``.
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
