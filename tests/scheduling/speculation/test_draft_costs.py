"""Tests of how often the draft model runs, given its cost and its accuracy, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_engine.request import Request, RequestOptions
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.speculation.async_planning import AsyncPlanning
from metal_engine.scheduling.speculation.draft_costs import DraftCosts
from metal_engine.scheduling.speculation.draft_gain import DraftGain
from metal_engine.scheduling.speculation.draft_lengths import MIN_GAIN, choose_lengths, least_gain
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.speculation.speculation import Speculation
from metal_engine.scheduling.speculation.step_times import StepTimes
from metal_engine.scheduling.token_allotment import StepBudget
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import UNKNOWN_DRAFT, Drafting, NewRequestData, SchedulerOutput
from tests.scheduling.speculation.test_draft_lengths import Clock, TimedStep, compute_bound, memory_bound
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.speculation import KnownTimes, draft_model_config, head_config, speculate
from tests.support.sweeps import sweep

NEVER = 1 << 30


class TimedDraftModel:
    """Drafts the tokens that requests will generate, or wrong tokens, in simulated time.

    Args:
        right_from: index of the first output token that it drafts correctly.
        forward_seconds: duration of a forward with any number of rows.
        token_seconds: additional duration for each token that it has to catch up with.
    """

    def __init__(
        self, harness: SchedulerHarness, clock: Clock, right_from: int, forward_seconds: float, token_seconds: float
    ) -> None:
        self._harness, self._clock, self._right_from = harness, clock, right_from
        self._forward_seconds, self._token_seconds = forward_seconds, token_seconds
        self._num_computed: dict[str, int] = {}
        self.num_forwards = self.num_chunk_tokens = self.max_chunk = self.num_followed = 0

    def draft(self, plan: SchedulerOutput) -> Drafting:
        began, drafting = self._clock.now, Drafting()
        for request_id, planned in plan.scheduled_spec_decode_tokens.items():
            assert planned == [UNKNOWN_DRAFT] * len(planned)
            request = self._harness.tracked[request_id].request
            self._follow(request_id, request.num_tokens, drafting)
            expected = self._harness.tracked[request_id].expected[request.num_output_tokens :][: len(planned)]
            is_right = request.num_output_tokens >= self._right_from
            drafting.token_ids[request_id] = expected if is_right else [token_id ^ 1 for token_id in expected]
        for request_id in plan.draft_model_req_ids:
            start = self._num_computed.get(request_id, 0)
            self._follow(request_id, start + plan.num_scheduled_tokens[request_id], drafting)
        self._clock.now += self._token_seconds * drafting.num_tokens
        longest = max(map(len, drafting.token_ids.values()), default=0)
        drafting.num_forwards, drafting.forward_seconds = longest, longest * self._forward_seconds
        self._clock.now += drafting.forward_seconds
        drafting.seconds = self._clock.now - began
        self.num_forwards += longest
        self.num_followed += len(plan.draft_model_req_ids)
        self.num_chunk_tokens += drafting.num_tokens
        self.max_chunk = max(self.max_chunk, drafting.num_tokens)
        return drafting

    def _follow(self, request_id: str, num_tokens: int, drafting: Drafting) -> None:
        drafting.num_tokens += max(0, num_tokens - self._num_computed.get(request_id, 0) - 5)
        drafting.num_computed_tokens[request_id] = self._num_computed[request_id] = num_tokens


class TimedHead(TimedDraftModel):
    """Draft head in simulated time. After four steps without requests for drafts, the next request gets none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_wanted = -NEVER

    def draft(self, plan: SchedulerOutput) -> Drafting:
        wanted = plan.scheduled_spec_decode_tokens
        is_carried = plan.step_id - self._last_wanted <= 4
        if wanted:
            self._last_wanted = plan.step_id
        return super().draft(plan) if is_carried else Drafting({request_id: [] for request_id in wanted})

    def _follow(self, request_id: str, num_tokens: int, drafting: Drafting) -> None:
        """Do nothing: a head has nothing to catch up with."""


@cache
def run(
    num_requests: int,
    right_from: int | None,
    seconds: Callable[[int], float],
    forward_seconds: float = 0.2,
    *,
    num_turns: int = 1,
    length: int = 400,
    is_ahead: bool = False,
    up_seconds: float = 0.0,
    is_head: bool = False,
    times: StepTimes | None = None,
) -> tuple[float, TimedDraftModel | None]:
    """Return the duration of ``num_turns`` rounds of ``num_requests`` requests. A step of n rows takes ``seconds(n)``.

    Args:
        right_from: see :class:`TimedDraftModel`; None for no draft model.
        is_ahead: True to plan steps asynchronously. The host then takes 0.1 s for each step.
        up_seconds: initial time of the clock, and idle time between two rounds.
        is_head: True for a draft head instead of a draft model.
        times: estimated step times. Default: measured.
    """
    config = SchedulerConfig(
        max_num_batched_tokens=128,
        max_num_seqs=num_requests,
        max_model_len=600,
        speculative=head_config(4) if is_head else draft_model_config(4),
        async_scheduling=is_ahead,
    )
    cache = CacheConfig(block_size=16, num_blocks=40 * num_requests, enable_prefix_caching=False)
    harness, clock = SchedulerHarness(config, cache, depth=1 + is_ahead), Clock()
    clock.now = end = up_seconds
    draft_model = None
    if right_from is not None:
        source = TimedHead if is_head else TimedDraftModel
        draft_model = source(harness, clock, right_from, forward_seconds, forward_seconds / 10)
        harness.runner.make_drafts = draft_model.draft
        proposer, ahead = make_proposer(config.speculative), AsyncPlanning(clock)
        gain = DraftGain(clock) if is_head else None
        speculate(harness.scheduler, proposer, times or StepTimes(clock), async_planning=ahead, gain=gain)
    execute = harness.runner.execute

    def timed(plan: SchedulerOutput) -> TimedStep:
        nonlocal end
        clock.now += 0.1 * is_ahead
        step = execute(plan)
        end = max(end, clock.now) + seconds(sum(plan.num_scheduled_tokens.values()))
        return TimedStep(step, clock, end)

    harness.runner.execute = timed  # type: ignore[assignment,method-assign]
    busy_seconds = 0.0
    for turn in range(num_turns):
        began = clock.now
        for i in range(num_requests):
            harness.submit(f"r{turn}.{i}", make_prompt(1000 * turn + i, 40), length)
        harness.run()
        busy_seconds += clock.now - began
        clock.now += up_seconds
    harness.drain()
    return busy_seconds, draft_model


def ratio(
    num_requests: int,
    right_from: int,
    seconds: Callable[[int], float] = memory_bound,
    forward_seconds: float = 0.2,
    *,
    is_head: bool = False,
    times: StepTimes | None = None,
    **more: Any,
) -> tuple[float, Any]:
    """Return the duration with drafts relative to the duration without, and the draft model or head."""
    without, _ = run(num_requests, None, seconds, **more)
    with_drafts, drafter = run(num_requests, right_from, seconds, forward_seconds, is_head=is_head, times=times, **more)
    return with_drafts / without, drafter


@pytest.mark.parametrize(
    ("seconds", "num_requests", "forward_seconds"),
    sweep(
        product([memory_bound, compute_bound], [1, 16], [0.1, 0.3, 1.0]),
        [(memory_bound, 16, 0.1), (memory_bound, 1, 1.0), (compute_bound, 16, 0.3), (compute_bound, 1, 0.1)],
    ),
)
def test_a_draft_model_that_is_wrong_costs_little(
    num_requests: int, seconds: Callable[[int], float], forward_seconds: float
) -> None:
    found, draft_model = ratio(num_requests, NEVER, seconds, forward_seconds)
    assert found <= 1.05 and draft_model.num_forwards


@pytest.mark.parametrize("num_requests", [1, 2, pytest.param(16, marks=pytest.mark.full)])
def test_a_useless_draft_model_costs_little_with_async_scheduling(num_requests: int) -> None:
    """The budget for probes is a fraction of the time of steps. Idle time does not count."""
    found, draft_model = ratio(num_requests, NEVER, num_turns=2, length=550, is_ahead=True, up_seconds=86_400.0)
    assert found <= 1.05 and draft_model.num_forwards > 10


@pytest.mark.parametrize("forward_seconds", [pytest.param(0.1, marks=pytest.mark.full), 0.3])
def test_a_useless_draft_model_costs_little_with_many_short_requests(forward_seconds: float) -> None:
    assert ratio(2, NEVER, forward_seconds=forward_seconds, num_turns=30, length=40)[0] <= 1.06


@pytest.mark.parametrize(
    ("is_head", "num_requests", "forward_seconds", "most"),
    [
        *((False, 1, 0.1, 0.4), (False, 1, 0.3, 0.6), (False, 8, 0.1, 0.57)),
        *((True, 1, 0.05, 0.4), (True, 1, 0.2, 0.5), (True, 8, 0.05, 0.55)),
    ],
)
def test_right_drafts_pay(is_head: bool, num_requests: int, forward_seconds: float, most: float) -> None:
    assert ratio(num_requests, 0, forward_seconds=forward_seconds, is_head=is_head)[0] <= most


@pytest.mark.parametrize("is_head", [False, True])
def test_drafting_resumes_when_drafts_become_right(is_head: bool) -> None:
    """Only the second half of the outputs can be predicted. Probes detect this, and a draft model catches up."""
    found, drafter = ratio(1, 150, forward_seconds=0.1, is_head=is_head)
    assert found <= 0.8 and (is_head or drafter.max_chunk > 20)


def test_a_draft_model_as_slow_as_the_target_soon_stops_drafting() -> None:
    """The cost of such a model is not worthwhile even if all its drafts are right."""
    found, draft_model = ratio(1, 0, forward_seconds=1.05)
    assert found <= 1.05 and draft_model.num_forwards < 25


@pytest.mark.parametrize(
    ("is_ahead", "num_requests", "forward_seconds"),
    sweep(
        product([False, True], [1, 16], [0.05, 0.2]),
        [(False, 16, 0.05), (False, 1, 0.2), (True, 16, 0.2), (True, 1, 0.05)],
    ),
)
def test_a_head_that_is_wrong_costs_little(num_requests: int, forward_seconds: float, is_ahead: bool) -> None:
    options: dict[str, Any] = {"is_head": True, "length": 500, "is_ahead": is_ahead}
    found, head = ratio(num_requests, NEVER, forward_seconds=forward_seconds, **options)
    assert found <= 1.02 and head.num_forwards > 5


@pytest.mark.parametrize(("num_requests", "most"), [(4, 0.75), (8, 0.92), (16, 0.77)])
def test_many_requests_have_a_draft_each_before_any_has_more(num_requests: int, most: float) -> None:
    """A row costs less from 16 rows on. All drafts of a few requests would not be worth a forward of the head."""

    def seconds(num_rows: int) -> float:
        return 0.2 + 0.05 * min(num_rows, 16) + 0.0275 * max(0, num_rows - 16)

    assert ratio(num_requests, 0, seconds, 0.05, is_head=True)[0] <= most


@pytest.mark.parametrize("is_ahead", [False, True])
def test_wrong_estimates_of_step_times_cost_little(is_ahead: bool) -> None:
    """Draft rows are estimated to take no time. A draft row takes as long as another row."""
    found, head = ratio(1, 0, float, is_head=True, times=KnownTimes(), length=500, num_turns=4, is_ahead=is_ahead)
    assert found <= 1.05, "1.17 if the estimates alone decide"
    assert head.num_forwards > 5


def test_draft_prefill_runs_for_fewer_prompts_if_drafts_are_wrong() -> None:
    _, right = run(1, 0, memory_bound, 0.1, num_turns=20, length=60)
    _, wrong = run(1, NEVER, memory_bound, 0.1, num_turns=20, length=60)
    assert right.num_followed >= 18 and right.num_chunk_tokens >= 20 * 30
    assert wrong.num_followed <= right.num_followed / 2


def test_draft_prefill_skips_requests_that_get_no_drafts() -> None:
    """The draft model also ignores pooling requests, and all prompts while the costs of drafts are unknown."""
    config = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=2, max_model_len=100, speculative=draft_model_config(4)
    )
    harness = SchedulerHarness(config, CacheConfig(block_size=4, num_blocks=60), drafts=2, has_draft_model=True)
    harness.submit("first", make_prompt(3, 20), 10)
    harness.run()  # measures the costs of drafts
    assert not any(plan.draft_model_req_ids for plan in harness.plans)
    harness.plans.clear()
    harness.submit("with", make_prompt(0, 20), 10)
    harness.submit("without", make_prompt(1, 20), 10, options=RequestOptions(use_speculation=False))
    harness.submit("pooled", make_prompt(2, 20), 1, pooling_type="MEAN")
    harness.drain()
    assert {r for plan in harness.plans for r in plan.draft_model_req_ids} == {"with"}
    assert {r for plan in harness.plans for r in plan.scheduled_spec_decode_tokens} == {"with"}


@given(
    p=st.floats(MIN_GAIN, 1.0),
    limit=st.integers(0, 8),
    rows=st.lists(st.floats(0.0, 0.5), max_size=10),
    draft_seconds=st.floats(0.0, 1.0),
)
def test_draft_lengths_account_for_draft_model_forward_time(
    p: float, limit: int, rows: list[float], draft_seconds: float
) -> None:
    seconds = [1.0]
    for more in rows:
        seconds.append(seconds[-1] + more)

    def rate(length: int) -> float:
        return sum(p**j for j in range(length + 1)) / (seconds[length] + length * draft_seconds)

    (ours,) = choose_lengths([p], [limit], 1, seconds, draft_seconds).lengths
    considered = [n for n in range(min(limit, len(rows)) + 1) if n == 0 or p**n >= MIN_GAIN]
    assert rate(ours) == pytest.approx(max(map(rate, considered)))
    if ours:
        assert p >= least_gain(1, seconds, draft_seconds) - 1e-9


def make_speculation(costs: DraftCosts) -> Speculation:
    speculative = draft_model_config(4)
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=9000, speculative=speculative)
    return Speculation(config, BlockManager(600, 16), make_proposer(speculative), KnownTimes(), costs)


def test_a_request_missing_much_draft_kv_does_not_prevent_other_drafts() -> None:
    """A request far behind catches up only if many of its tokens remain."""
    costs, drafting = DraftCosts(), Drafting(num_forwards=1, forward_seconds=0.01, seconds=1.01, num_tokens=100)
    for _ in range(2):
        costs.measured(1.0, drafting, ())
    speculation = make_speculation(costs)
    found = []
    for max_tokens in (6, 500):
        requests = [Request(name, [1] * 4000, SamplingParams(), max_tokens=max_tokens) for name in ("near", "far")]
        drafting = Drafting(num_computed_tokens={"near": 3999, "far": 0 if max_tokens == 6 else 3500})
        costs.measured(1.0, drafting, ("near", "far"))
        plan = SchedulerOutput(0)
        for request in requests:
            request.num_computed_tokens, request.num_output_placeholders = 4000, 1
            plan.num_scheduled_tokens[request.request_id] = 1
            plan.sampled_req_ids.append(request.request_id)
        speculation.add_drafts(plan, StepBudget(60, 1 << 30), {r.request_id: r for r in requests})
        found.append(set(plan.scheduled_spec_decode_tokens))
    assert found == [{"near"}, {"near", "far"}]


def test_the_first_draft_forward_is_excluded_from_measured_costs() -> None:
    """The first forward and the first chunk may include compilation, so they are not counted."""
    costs = DraftCosts()
    request = Request("a", [1] * 102, SamplingParams(), max_tokens=128)
    costs.measured(9.0, Drafting(num_forwards=4, forward_seconds=4.0, seconds=8.0, num_tokens=4), ())
    assert not costs.are_known and costs.forward_seconds == costs.catching_up_seconds(request) == 0
    costs.measured(1.0, Drafting(num_forwards=4, forward_seconds=0.4, seconds=0.4), ())
    assert costs.are_known and costs.forward_seconds == pytest.approx(0.1)
    assert costs.catching_up_seconds(request) <= 100 * 0.1 / 128  # a token costs at most a forward
    costs.measured(1.0, Drafting(num_tokens=100, seconds=1.0), ())
    assert costs.catching_up_seconds(request) == pytest.approx(100 * 0.01 / 128)


def test_draft_kv_count_of_a_request_resets_on_readmission() -> None:
    """A readmitted request lacks all KV of the draft model. KV of rejected drafts never counts."""
    costs = DraftCosts()
    speculation = make_speculation(costs)
    request = Request("a", [1] * 400, SamplingParams(), max_tokens=200)
    drafting = Drafting(num_forwards=1, forward_seconds=0.01, seconds=1.01, num_tokens=100)
    for _ in range(2):
        costs.measured(1.0, drafting, ())
    costs.measured(1.0, Drafting(num_computed_tokens={"a": 404}), ("a",))
    assert costs.catching_up_seconds(request) == 0
    costs.record_num_tokens("a", 400)
    request.token_ids += [1] * 12
    assert costs.catching_up_seconds(request) == pytest.approx(10 * 0.01 / 128)
    plan = SchedulerOutput(1, {"a": 64}, new_requests=[NewRequestData.of(request, [])])
    speculation.add_drafts(plan, StepBudget(0, 0), {"a": request})
    assert costs.catching_up_seconds(request) == pytest.approx(410 * 0.01 / 128)


def test_one_forward_serves_all_requests() -> None:
    rng = random.Random(0)
    acceptances = [rng.uniform(0.7, 0.9) for _ in range(8)]
    assert choose_lengths(acceptances, [4] * 8, 8, [1.0] * 33, 0.3).lengths != [0] * 8
    assert choose_lengths(acceptances[:1], [4], 1, [1.0] * 33, 1.0).lengths == [0]
    assert choose_lengths(acceptances[:1], [4], 1, [1.0] * 33, 1.0, are_computed=[False]).lengths == [4]


@pytest.mark.parametrize("row_seconds", [0.01, 0.03, 0.05, 0.1])
def test_lookups_beside_a_head_are_chosen_as_without_a_head(row_seconds: float) -> None:
    acceptances, times = [0.1 * i for i in range(1, 9)], [1 + row_seconds * n for n in range(33)]
    without = choose_lengths(acceptances, [4] * 8, 8, times)
    assert choose_lengths(acceptances, [4] * 8, 8, times, 0.3, are_computed=[False] * 8) == without
