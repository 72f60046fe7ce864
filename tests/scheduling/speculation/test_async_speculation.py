"""Tests of which steps wait for tokens to have drafts: they must get drafts that beat asynchronous planning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_engine.request import Request, RequestOptions
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.speculation.async_planning import AsyncPlanning
from metal_engine.scheduling.speculation.draft_capacity import DraftCapacity
from metal_engine.scheduling.speculation.draft_lengths import DraftLengths
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.speculation.step_times import StepTimes
from metal_engine.settings.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from tests.scheduling.speculation.test_draft_lengths import KINDS, memory_bound, run
from tests.scheduling.speculation.test_speculation import RightDrafts, kinds_of, make_harness
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.speculation import FreeDrafts, KnownAheadTimes, draft_model_config, speculate, speculative_config

# --- requests that need their tokens on the host ---


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("num_on_host", ["all", "half"])
def test_requests_that_need_their_tokens_on_the_host_have_drafts(num_requests: int, num_on_host: str) -> None:
    """No step of these requests can be planned asynchronously. Uses measured times."""
    on_host = {"all": num_requests, "half": num_requests // 2}[num_on_host]
    without, _ = run(num_requests, None, memory_bound, num_on_host=on_host, **KINDS["ahead"])
    with_drafts, _ = run(num_requests, 0, memory_bound, num_on_host=on_host, **KINDS["ahead"])
    assert with_drafts <= 0.55 * without


@pytest.mark.parametrize("measured", [(), (4, 4, 4)], ids=["no step ahead", "larger ones only"])
def test_host_token_requests_get_drafts_without_known_async_step_times(measured: tuple[int, ...]) -> None:
    harness = make_harness(num_drafts=4, ahead_seconds=0.1)
    ahead = AsyncPlanning()
    for i, num_rows in enumerate(measured):
        ahead.planned(-10 + i, num_rows)
        ahead.ended(-10 + i)
    assert ahead.seconds(1) is None
    speculate(harness.scheduler, RightDrafts(harness), async_planning=ahead)
    harness.submit("a", make_prompt(0, 6), 21, needs_token_on_host=True)
    harness.run()
    assert kinds_of(harness) == ["plain", "waits", *["drafts", "waits"] * 4]
    harness.drain()


def test_async_comparison_counts_half_of_the_host_token_requests_per_step() -> None:
    """The comparison with asynchronous planning uses the true number of rows."""
    asked: list[float] = []

    class Watched(KnownAheadTimes):
        def is_slower(self, num_rows: float, choice: DraftLengths) -> bool:
            asked.append(num_rows)
            return super().is_slower(num_rows, choice)

    harness = make_harness(num_drafts=4, ahead_seconds=0.9)
    speculate(harness.scheduler, RightDrafts(harness), async_planning=Watched(0.9))
    for i in range(4):
        harness.submit(f"r{i}", make_prompt(i, 4), 30, needs_token_on_host=i < 2)
    harness.drain()
    assert asked[0] == 3 and set(asked) >= {3} and max(asked) <= 4


def test_a_suspended_request_may_have_drafts_after_an_async_step() -> None:
    """A request with a late mask may have drafts again after its next step, whichever way that step is planned."""
    harness = make_harness(num_drafts=4, ahead_seconds=1e-6)
    speculation = harness.scheduler.speculation
    harness.submit("a", make_prompt(0, 6), 40)
    for _ in range(4):
        harness.step()
    speculation.suspend_drafts("a")
    harness.step()
    assert set(kinds_of(harness)[2:]) == {"plain"} and not speculation._proposals._suspended
    harness.drain()


NO_CAPACITY: dict[str, dict[str, Any]] = {
    "attention work": {"max_attention_work": 20},
    "slots": {"num_state_slots": 2, "max_num_seqs": 2},
    "rows that sample": {"max_num_batched_tokens": 2, "max_num_seqs": 2},
}


@pytest.mark.parametrize("name", NO_CAPACITY)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_steps_do_not_wait_for_drafts_that_there_is_no_room_for(name: str, method: str) -> None:
    """Steps do not wait for drafts that would be worth their cost, nor for a probe."""
    limits: dict[str, Any] = {"num_blocks": 40, "block_size": 4, "num_state_slots": 0, **NO_CAPACITY[name]}
    sizes = {key: limits.pop(key) for key in ("num_blocks", "block_size", "num_state_slots")}
    speculative = speculative_config(4) if method == "ngram" else draft_model_config(4)
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 2, "max_model_len": 100, **limits}
    harness = SchedulerHarness(
        SchedulerConfig(**limits, speculative=speculative, async_scheduling=True),
        CacheConfig(enable_prefix_caching=False, **sizes),
        depth=2,
    )
    proposer = RightDrafts(harness) if method == "ngram" else make_proposer(speculative)
    costs = None if method == "ngram" else FreeDrafts()
    # Drafts of the model are tried only: steps ahead take no time.
    ahead = KnownAheadTimes(0.9 if method == "ngram" else 1e-6)
    speculate(harness.scheduler, proposer, costs=costs, async_planning=ahead)
    for i in range(2):
        harness.submit(f"r{i}", make_prompt(i, 10), 30)
    for _ in range(20):
        harness.step()
    assert kinds_of(harness) == ["plain"] * 20
    harness.abort("r0")
    harness.abort("r1")
    harness.drain()


def test_draft_capacity_is_limited_to_blocks_and_work_left_by_decodes() -> None:
    """The limits are blocks, and attention work: 1 + 2 + ... for the keys that each row attends to."""
    blocks = BlockManager(8, 4)
    requests = [Request(name, list(range(n)), SamplingParams(), max_tokens=50) for name, n in (("a", 8), ("b", 9))]
    for request in requests:
        request.num_computed_tokens = request.num_tokens
        assert blocks.allocate(request.request_id, request.num_tokens)
    # The next token of a is in a new block with capacity for 3 drafts. The block of b has capacity for 2. Two blocks
    # remain.
    capacity = DraftCapacity(requests, 1000, blocks, None)
    assert [capacity.take(request, 12) for request in requests] == [11, 2]
    capacity = DraftCapacity(requests, 1000, blocks, None)
    assert [capacity.take(request, n) for request, n in zip(requests, (4, 12), strict=True)] == [4, 6]
    # The rows attend to 9 + 10 keys; two drafts of a, to 10 + 11; one draft of b, to 11.
    for work, expected in (
        (19, [0, 0]),
        (19 + 9, [0, 0]),
        (19 + 21, [2, 0]),
        (19 + 10 + 11, [2, 0]),
        (19 + 32, [2, 1]),
    ):
        capacity = DraftCapacity(requests, work, blocks, None)
        assert [capacity.take(request, 2) for request in requests] == expected, work
    assert capacity.take(requests[0], -1) == 0


def test_steps_wait_for_drafts_that_there_is_room_for() -> None:
    """A spare state slot, and attention work and blocks for one draft, are sufficient."""
    for limits in ({"num_state_slots": 3}, {"max_attention_work": 90}, {"num_blocks": 14}):
        harness = make_harness(ahead_seconds=0.9, max_num_seqs=2, **limits)
        for i in range(2):
            harness.submit(f"r{i}", make_prompt(i, 10), 16)
        harness.run()
        assert kinds_of(harness).count("drafts") >= 3, limits
        harness.drain()


class Measured(StepTimes):
    """Records which steps are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def measured(self, num_rows: int, seconds: float) -> None:
        self.rows.append(num_rows)

    def times(self, num_rows: int, most: int) -> list[float]:
        return [1.0] * (most + 1)


def async_harness() -> tuple[SchedulerHarness, SpeculativeConfig]:
    """Return a scheduler that plans ahead for a draft model, and its speculative configuration."""
    speculative = draft_model_config(2)
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 100}
    harness = SchedulerHarness(
        SchedulerConfig(**limits, speculative=speculative, async_scheduling=True),
        CacheConfig(block_size=4, num_blocks=60, enable_prefix_caching=False),
        depth=2,
        drafts=2,
        has_draft_model=True,
    )
    return harness, speculative


def test_chunks_of_a_prompt_are_planned_ahead() -> None:
    """The step in flight is measured. Steps planned meanwhile are not measured, and do not wait for the draft model."""
    harness, speculative = async_harness()
    scheduler, times = harness.scheduler, Measured()
    speculate(scheduler, make_proposer(speculative), times, FreeDrafts(), async_planning=KnownAheadTimes(0.9))
    harness.submit("a", make_prompt(0, 4), 40, needs_token_on_host=True)
    harness.submit("without", make_prompt(2, 4), 40, options=RequestOptions(use_speculation=False))
    harness.schedule()
    harness.update()
    scheduler.speculation.suspend_drafts("a")
    assert harness.schedule().num_scheduled_tokens == {"a": 1, "without": 1}
    harness.abort("without")
    harness.submit("b", make_prompt(1, 30), 2)
    plan = harness.schedule()  # a must wait for its token in flight
    assert plan.num_scheduled_tokens == {"b": 8} and not plan.draft_model_req_ids
    times.rows.clear()
    harness.update()
    assert times.rows == [2]
    plan = harness.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 7}
    assert not plan.draft_model_req_ids and not plan.scheduled_spec_decode_tokens
    harness.update()
    harness.update()
    assert times.rows == [2]
    harness.drain()


def test_abort_releases_the_request_selected_for_a_probe() -> None:
    """The request holds its images and its adapter's slot, even if no step follows."""
    harness, speculative = async_harness()
    ahead = KnownAheadTimes(1e-6)
    speculate(harness.scheduler, make_proposer(speculative), costs=FreeDrafts(), async_planning=ahead)
    speculation = harness.scheduler.speculation
    assert speculation is not None
    harness.submit("a", make_prompt(0, 6), 40)
    for _ in range(2):
        harness.step()
    assert speculation._probe_request is not None
    harness.abort("a")
    assert speculation._probe_request is None
    harness.drain()


def test_an_empty_step_does_not_interrupt_the_step_time_measurement() -> None:
    """The empty step is planned while the request's token is in flight.

    The measurement of the step in flight continues.
    """
    harness = make_harness(num_drafts=4, ahead_seconds=0.9)
    times = Measured()
    speculate(harness.scheduler, RightDrafts(harness), times, async_planning=AsyncPlanning())
    harness.submit("a", make_prompt(0, 6), 21, needs_token_on_host=True)
    harness.run()
    assert times.rows == [5] * 4
    harness.drain()


def test_recomputation_after_a_rejection_stays_within_the_token_budget() -> None:
    """A request resumes from its state before the drafts, with as many rows as the budget allows."""
    harness = make_harness(num_drafts=6, num_right=5, num_state_slots=12)
    harness.submit("a", make_prompt(0, 4), 40)
    while not any(plan.scheduled_spec_decode_tokens for plan in harness.plans):
        harness.step()
    scheduler, request = harness.scheduler, harness.tracked["a"].request
    assert scheduler.states.is_rejected(request) and request.num_tokens - request.num_computed_tokens == 7
    config = scheduler.config
    scheduler.config = replace(config, max_num_batched_tokens=4)  # the remaining budget is used by other requests
    assert harness.step().num_scheduled_tokens == {"a": 4}
    scheduler.config = config
    assert harness.step().num_scheduled_tokens["a"] == 3
    harness.drain()
