"""Tests of the number of drafts: measured step times, expected acceptance, and whole runs in simulated time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_engine.request import Request
from metal_engine.scheduling.speculation.acceptance import Acceptance
from metal_engine.scheduling.speculation.async_planning import AsyncPlanning
from metal_engine.scheduling.speculation.draft_lengths import choose_lengths, least_gain, time_weight
from metal_engine.scheduling.speculation.step_times import StepTimes
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import ModelOutput, SchedulerOutput
from tests.support.fake_kv_runner import FakeStep, make_prompt
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.speculation import Drafter, speculate, speculative_config
from tests.support.sweeps import sweep


class Clock:
    """Clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measure(times: StepTimes, clock: Clock, num_rows: int, seconds: float, *, repeat: int = 2) -> None:
    for _ in range(repeat):
        times.start()
        times.planned(num_rows)
        clock.now += seconds
        times.end()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> StepTimes:
    return StepTimes(clock)


def test_step_times_are_unknown_below_the_fewest_measured_rows(times: StepTimes, clock: Clock) -> None:
    assert times.times(1, 4) == []
    measure(times, clock, 4, 1.0)
    assert times.times(3, 4) == [] and times.times(4, 3) == [1.0] * 4


def test_larger_steps_are_tried_little_by_little(times: StepTimes, clock: Clock) -> None:
    measure(times, clock, 16, 1.0)
    assert times.times(16, 64) == [1.0] * 5
    measure(times, clock, 20, 2.0)
    assert len(times.times(16, 64)) == 25 - 16 + 1 and len(times.times(22, 64)) == 25 - 22 + 1
    assert len(times.times(40, 64)) == 1  # the first entry is without drafts


def test_the_first_step_of_a_size_may_have_compiled_something(times: StepTimes, clock: Clock) -> None:
    measure(times, clock, 1, 9.0, repeat=1)
    assert times.times(1, 1) == []
    measure(times, clock, 1, 1.0, repeat=1)
    assert times.times(1, 1) == [1.0, 1.0]


def test_sizes_in_between_lie_on_a_line(times: StepTimes, clock: Clock) -> None:
    for num_rows, seconds in ((1, 1.0), (5, 2.0), (8, 1.5), (9, 3.0)):
        measure(times, clock, num_rows, seconds)
    assert times.times(1, 10) == pytest.approx([1, 1.25, 1.5, 1.75, 2, 2, 2, 2, 3, 3, 3], rel=0.02)
    assert times.times(3, 2) == pytest.approx([1.5, 1.75, 2], rel=0.02)
    assert times.times(1, 0) == pytest.approx([1], rel=0.02)


def test_similar_step_sizes_share_one_time_estimate(times: StepTimes, clock: Clock) -> None:
    measure(times, clock, 33, 1.0, repeat=1)
    measure(times, clock, 35, 1.0, repeat=1)
    assert times.times(32, 0) == [1.0]


def test_a_step_that_was_delayed_changes_little(times: StepTimes, clock: Clock) -> None:
    measure(times, clock, 1, 1.0, repeat=5)
    measure(times, clock, 1, 60.0, repeat=1)
    assert times.times(1, 0)[0] < 1.15
    measure(times, clock, 1, 4.0, repeat=30)  # steps take longer, because contexts have grown
    assert times.times(1, 0)[0] == pytest.approx(4.0, rel=0.05)


def test_an_old_step_time_decays_until_the_size_is_measured_again(times: StepTimes, clock: Clock) -> None:
    measure(times, clock, 1, 1.0)
    measure(times, clock, 5, 9.0)
    assert times.times(1, 4)[4] == pytest.approx(9, rel=0.01)
    measure(times, clock, 1, 1.0, repeat=3000)
    assert times.times(1, 4)[4] < 1.2
    measure(times, clock, 5, 2.0, repeat=1)
    assert times.times(1, 4)[4] == pytest.approx(2, rel=0.1)


def test_steps_that_do_more_than_decode_are_not_measured(times: StepTimes, clock: Clock) -> None:
    measure(times, clock, 1, 1.0)
    times.start()
    clock.now += 100
    times.end()
    assert times.times(1, 0) == [1.0]


def test_acceptance_estimate_follows_accepted_drafts() -> None:
    acceptance = Acceptance()
    first = acceptance.of("new")
    for _ in range(30):
        acceptance.tried("right", 4, 4)
        acceptance.tried("wrong", 4, 0)
    assert acceptance.of("right") > 0.99 and acceptance.of("wrong") < 0.01
    acceptance.tried("half", 8, 1)  # the six drafts after the first wrong draft carry no information
    assert first < acceptance.of("right") and 0.1 < acceptance.of("half") < 0.9
    for _ in range(200):
        acceptance.tried("wrong", 4, 0)
    assert acceptance.of("new") < 0.05, "who comes next is expected to be like those before"
    acceptance.forget("right")
    assert acceptance.of("right") == acceptance.of("new")


@given(
    requests=st.lists(st.tuples(st.floats(0.06, 1.0), st.integers(0, 4)), min_size=1, max_size=4),
    steps=st.lists(st.floats(0.0, 0.5), max_size=10),
)
def test_draft_lengths_maximize_tokens_per_second(requests: list[tuple[float, int]], steps: list[float]) -> None:
    seconds = list(itertools.accumulate([1.0, *steps]))
    acceptances, limits = [p for p, _ in requests], [limit for _, limit in requests]

    def rate(lengths: tuple[int, ...]) -> float:
        if sum(lengths) >= len(seconds):
            return 0.0
        tokens = sum(sum(p**j for j in range(n + 1)) for p, n in zip(acceptances, lengths, strict=True))
        return tokens / (1 + time_weight(len(requests)) * (seconds[sum(lengths)] - 1))

    ours = choose_lengths(acceptances, limits, len(requests), seconds).lengths
    assert all(0 <= n <= limit for n, limit in zip(ours, limits, strict=True))
    # Drafts with a very low acceptance probability are not considered at all.
    considered = [
        range(1 + sum(p ** (j + 1) >= 0.05 for j in range(limit))) for p, limit in zip(acceptances, limits, strict=True)
    ]
    assert rate(tuple(ours)) == pytest.approx(max(map(rate, itertools.product(*considered))))
    if sum(ours):
        assert max(acceptances) >= least_gain(len(requests), seconds) - 1e-9


def test_no_drafts_are_chosen_if_step_time_is_proportional_to_rows() -> None:
    proportional = [float(n) for n in range(16, 80)]
    assert least_gain(16, proportional) == pytest.approx(time_weight(16)) and time_weight(1) == 1
    assert choose_lengths([0.9] * 16, [4] * 16, 16, proportional).lengths == [0] * 16
    assert choose_lengths([0.9] * 16, [4] * 16, 16, [1.0] * 65).lengths == [4] * 16
    assert choose_lengths([0.9], [4], 1, [1.0]).lengths == [0]


@given(
    requests=st.lists(st.tuples(st.floats(0.06, 1.0), st.integers(0, 4)), min_size=1, max_size=3),
    row_seconds=st.floats(0.0, 0.5),
)
def test_draft_lengths_account_for_recomputed_rows(requests: list[tuple[float, int]], row_seconds: float) -> None:
    """The result equals a sum over all outcomes of the drafts if every row costs the same."""
    acceptances, limits = [p for p, _ in requests], [limit for _, limit in requests]
    num_again = [1 + i for i in range(len(requests))]
    times = [1 + row_seconds * n for n in range(14)]
    choice = choose_lengths(acceptances, limits, len(requests), times, num_again=num_again)
    tokens, rows = 0.0, float(sum(choice.lengths))
    for p, n, again in zip(acceptances, choice.lengths, num_again, strict=True):
        for num_accepted in range(n):
            probability = p**num_accepted * (1 - p)
            tokens += probability * (1 + num_accepted)
            rows += probability * (again + num_accepted)
        tokens += p**n * (1 + n)
    assert choice.tokens == pytest.approx(tokens)
    assert choice.seconds == pytest.approx(1 + row_seconds * rows)
    without = choose_lengths(acceptances, limits, len(requests), times)
    assert sum(choice.lengths) <= sum(without.lengths)


def test_recurrent_models_get_fewer_drafts_if_rows_are_expensive() -> None:
    times = [1 + 0.15 * n for n in range(9)]
    assert choose_lengths([0.8], [8], 1, times).lengths == [5]
    assert choose_lengths([0.8], [8], 1, times, num_again=[1]).lengths == [4]
    assert choose_lengths([0.5], [8], 1, times).lengths == [2]
    assert choose_lengths([0.5], [8], 1, times, num_again=[1]).lengths == [1]
    assert choose_lengths([0.25], [8], 1, times).lengths == [1]
    assert choose_lengths([0.25], [8], 1, times, num_again=[1]).lengths == [0]


def test_catching_up_counts_once() -> None:
    """The cost is counted with the first draft of the request that catches up."""
    times = [1.0] * 9
    assert choose_lengths([0.8, 0.8], [4, 4], 2, times, catching_up=[0.0, 0.0]).lengths == [4, 4]
    choice = choose_lengths([0.8, 0.8], [4, 4], 2, times, catching_up=[0.0, 0.4])
    assert choice.lengths == [4, 4] and choice.seconds == pytest.approx(1.4)
    assert choose_lengths([0.8], [4], 1, times, catching_up=[2.5]).lengths == [0]
    assert choose_lengths([0.8], [4], 1, times, 0.1, catching_up=[0.2]).seconds == pytest.approx(1.6)


def test_expected_tokens_scale_with_the_chance_of_drafts() -> None:
    times = [1.0] * 9
    sure, unsure = (choose_lengths([0.8], [4], 1, times, chances=[chance]) for chance in (1.0, 0.5))
    assert unsure.tokens - 1 == pytest.approx((sure.tokens - 1) / 2)


# --- runs ---------------------------------------------------------------------------------------------------


class Drafts(Drafter):
    """Proposes the tokens that a request will generate, or wrong tokens.

    Args:
        right_from: index of the first token that is proposed correctly.
        is_unsure: True if half of the proposals are right, and every second request has no proposals.
    """

    def __init__(self, harness: SchedulerHarness, *, right_from: int, is_unsure: bool = False) -> None:
        super().__init__()
        self._harness = harness
        self._right_from = right_from
        self._is_unsure = is_unsure
        self._rng = random.Random(0)

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        expected = self._harness.tracked[request.request_id].expected[request.num_output_tokens :]
        is_right = request.num_output_tokens >= self._right_from
        if self._is_unsure:
            is_right = self._rng.random() < 0.5
            num_tokens = 0 if int(request.request_id[1:]) % 2 else 1
        return expected[:num_tokens] if is_right else [token_id ^ 1 for token_id in expected[:num_tokens]]


NEVER = 1 << 30


class TimedStep:
    """Step that ends at a given time of the clock."""

    def __init__(self, step: FakeStep, clock: Clock, end: float) -> None:
        self._step, self._clock, self._end = step, clock, end

    def result(self) -> ModelOutput:
        self._clock.now = max(self._clock.now, self._end)
        return self._step.result()


@cache
def run(
    num_requests: int,
    right_from: int | None,
    seconds: Callable[[int], float],
    *,
    is_recurrent: bool = False,
    host_seconds: float = 0.0,
    is_ahead: bool = False,
    num_on_host: int = 0,
    is_unsure: bool = False,
    is_alone_first: bool = False,
) -> tuple[float, int]:
    """Return the duration of requests of 400 tokens if a step of n rows takes ``seconds(n)``, and the number of rows.

    Args:
        right_from: see :class:`Drafts`; None disables drafts.
        is_recurrent: True if the model has recurrent states, which cannot go back.
        host_seconds: time of the host before the device can start a step.
        is_ahead: True to plan steps asynchronously.
        num_on_host: number of requests that need their tokens on the host.
        is_unsure: see :class:`Drafts`.
        is_alone_first: True to run another request, of 40 tokens, before these requests.
    """
    limits = {"max_num_batched_tokens": 128, "max_num_seqs": num_requests, "max_model_len": 410}
    speculative = None if right_from is None else speculative_config(4)
    harness = SchedulerHarness(
        SchedulerConfig(**limits, speculative=speculative, async_scheduling=is_ahead),
        CacheConfig(
            block_size=16, num_blocks=32 * num_requests, num_state_slots=2 * num_requests if is_recurrent else 0
        ),
        depth=1 + is_ahead,
    )
    clock = Clock()
    if right_from is not None:
        drafts = Drafts(harness, right_from=right_from, is_unsure=is_unsure)
        speculate(harness.scheduler, drafts, StepTimes(clock), async_planning=AsyncPlanning(clock))
    execute, num_rows, end = harness.runner.execute, 0, 0.0

    def timed(plan: SchedulerOutput) -> TimedStep:
        nonlocal num_rows, end
        rows = sum(plan.num_scheduled_tokens.values())
        num_rows += rows
        clock.now += host_seconds
        end = max(end, clock.now) + seconds(rows)
        return TimedStep(execute(plan), clock, end)

    harness.runner.execute = timed  # type: ignore[assignment,method-assign]
    if is_alone_first:
        harness.submit("alone", make_prompt(num_requests, 4), 40)
        harness.drain()
    for i in range(num_requests):
        harness.submit(f"r{i}", make_prompt(i, 4), 400, needs_token_on_host=i < num_on_host)
    harness.drain()
    return clock.now, num_rows


def ratio(num_requests: int, right_from: int, seconds: Callable[[int], float], **kind: Any) -> float:
    """Return the duration with drafts relative to the duration without."""
    return run(num_requests, right_from, seconds, **kind)[0] / run(num_requests, None, seconds, **kind)[0]


def memory_bound(num_rows: int) -> float:
    return 1.0 + 0.05 * num_rows


def compute_bound(num_rows: int) -> float:
    return 0.1 * max(num_rows, 10)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recurrent": {"is_recurrent": True},
    "ahead": {"is_ahead": True, "host_seconds": 0.2},
    "recurrent, ahead": {"is_recurrent": True, "is_ahead": True, "host_seconds": 0.2},
}


@pytest.mark.parametrize(
    ("seconds", "num_requests", "kind"),
    sweep(
        itertools.product([memory_bound, compute_bound], [1, 16], KINDS),
        [
            *((memory_bound, 1, "plain"), (memory_bound, 16, "recurrent"), (memory_bound, 16, "ahead")),
            *((compute_bound, 16, "plain"), (compute_bound, 1, "ahead"), (compute_bound, 16, "recurrent, ahead")),
        ],
    ),
)
def test_wrong_drafts_cost_little(num_requests: int, seconds: Callable[[int], float], kind: str) -> None:
    assert ratio(num_requests, NEVER, seconds, **KINDS[kind]) <= (1.05 if num_requests == 1 else 1.02)


def test_drafts_for_half_of_the_requests_do_not_slow_the_batch() -> None:
    """Half of the requests have drafts, and half of the drafts are right.

    The other requests take the same number of steps.
    """
    assert run(16, 0, memory_bound, is_unsure=True)[0] <= 1.02 * run(16, None, memory_bound)[0]


# Number of requests, index of the first right draft, and the largest ratio of the durations: plain, and other kinds.
GAINS = [
    (1, 0, 0.27, 0.33),
    (8, 0, 0.5, 0.55),
    # The outputs become predictable only in their second half.
    (1, 200, 0.66, 0.7),
    (8, 200, 0.8, 0.8),
]


@pytest.mark.parametrize(
    ("kind", "num_requests", "right_from", "most_plain", "most"),
    sweep(
        [(kind, *gain) for kind in KINDS for gain in GAINS],
        [(kind, *gain) for kind, gain in [*zip(KINDS, GAINS, strict=True), ("plain", GAINS[1])]],
    ),
)
def test_right_drafts_reduce_run_time_if_rows_are_cheap(
    num_requests: int, right_from: int, most_plain: float, most: float, kind: str
) -> None:
    found = ratio(num_requests, right_from, memory_bound, **KINDS[kind])
    assert found <= (most_plain if kind == "plain" else most)


def test_full_steps_have_no_drafts() -> None:
    """If another row costs as much as it yields, few drafts are tried, and their cost is negligible."""
    without, num_rows = run(16, None, compute_bound)
    with_drafts, num_rows_with = run(16, 0, compute_bound)
    assert with_drafts <= 1.02 * without
    assert num_rows_with <= 1.05 * num_rows


@pytest.mark.parametrize(
    ("kind", "num_requests", "most"),
    sweep(
        [(kind, *case) for kind in KINDS for case in ((8, 0.55), (16, 0.75))],
        [("plain", 16, 0.75), *((kind, 8, 0.55) for kind in KINDS if kind != "plain")],
    ),
)
def test_drafts_are_tried_at_unmeasured_step_sizes(num_requests: int, most: float, kind: str) -> None:
    """A single request runs first, and then many requests arrive."""
    assert ratio(num_requests, 0, memory_bound, is_alone_first=True, **KINDS[kind]) <= most


def test_async_planning_is_chosen_if_faster_than_drafts() -> None:
    """The host takes as long as the device, and all drafts are right, but additional rows are expensive."""

    def dear(num_rows: int) -> float:
        return 1.0 + 0.9 * (num_rows - 1)

    kind = {"is_ahead": True, "host_seconds": 0.9}
    without, _ = run(1, None, dear, **kind)
    with_drafts, _ = run(1, 0, dear, **kind)
    waiting, _ = run(1, 0, dear, host_seconds=0.9)
    assert with_drafts <= 1.03 * without < waiting
