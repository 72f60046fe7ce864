"""Chooses how many drafts are worth their cost, from measured step times (``step_times.py``) and acceptance rates.

A step of n rows takes T(n) seconds. Each request that samples yields one token plus its accepted drafts. The number of
drafts is chosen so that (expected tokens) / T(n) is largest. It is 0 if no additional row yields more than it costs.

All requests in a step wait for the time that drafts add, even requests that have no drafts and gain nothing. The added
time is therefore weighted more if the step has other requests.

A recurrent state cannot return to the last accepted draft. If a draft is rejected, the next step recomputes the
accepted drafts and the rows before them. The expected cost of the recomputation is added to T(n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Drafts with a lower acceptance probability are not considered, whatever they cost.
MIN_GAIN = 0.05
# Extra weight of the step time that drafts add, scaled by the fraction of the step's requests that do not own the
# drafts. Without it, requests with half of their drafts accepted would make a batch of sixteen requests 3% slower.
_OTHERS_WEIGHT = 0.75


def least_gain(num_sampling: int, times: Sequence[float], draft_seconds: float = 0.0) -> float:
    """Return the acceptance probability below which drafts are not worth their cost, whatever their number.

    At least ``MIN_GAIN``. Infinity if ``times`` covers no drafts.

    Args:
        num_sampling: number of tokens that the step yields without drafts.
        times: result of :meth:`StepTimes.times`, indexed by the step's number of drafts.
        draft_seconds: time to compute one draft for each request before the step, in seconds.
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
    """Return the weight of the time that draft rows add to a step of ``num_sampling`` requests: 1 for one request."""
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

    All sequences except ``times`` have an entry for each request.

    Args:
        acceptances: probability that a draft of the request is accepted if the tokens before the draft are right.
        limits: maximum number of drafts of the request.
        num_sampling: number of tokens that the step yields without drafts.
        times: result of :meth:`StepTimes.times`: seconds of the step for each total number of drafts from 0 on. Not
            empty. Its last index is the maximum total number.
        draft_seconds: time to compute one draft for each request before the step, in seconds.
        num_again: number of rows that the next step recomputes after a rejected draft, not counting the rows of the
            accepted drafts. None if nothing is recomputed.
        chances: probability that the guesses for tokens in flight, which precede the request's drafts, are right. None
            means 1.
        catching_up: additional seconds that the request's first draft costs. None means 0.
        are_computed: True if the request's drafts take ``draft_seconds``. None means True for all requests.
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
    # A draft model drafts for all requests: no request waits only for the drafts of others.
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
    """Return by how many seconds ``num_rows`` more rows prolong a step. ``num_rows`` may be a fraction."""
    most = len(times) - 1
    if num_rows >= most:
        return (times[most] - times[0]) * num_rows / most
    below = int(num_rows)
    return times[below] + (times[below + 1] - times[below]) * (num_rows - below) - times[0]
