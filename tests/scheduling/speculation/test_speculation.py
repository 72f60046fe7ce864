"""Tests of drafts in plans: limits, handling of results, and detection of errors by the harness."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from metal_engine.request import Request, RequestOptions
from metal_engine.scheduling.speculation.async_planning import AsyncPlanning
from metal_engine.scheduling.speculation.step_times import StepTimes
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.speculation import Drafter, KnownAheadTimes, speculate, speculative_config

NEVER_WRONG = 1 << 30


class RightDrafts(Drafter):
    """Proposes the first ``num_right`` tokens that a request will generate, and wrong tokens after them."""

    def __init__(self, harness: SchedulerHarness, num_right: int = NEVER_WRONG) -> None:
        super().__init__()
        self._harness = harness
        self._num_right = num_right

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        expected = self._harness.tracked[request.request_id].expected
        drafts = expected[request.num_output_tokens : request.num_output_tokens + num_tokens]
        return [token_id ^ (i >= self._num_right) for i, token_id in enumerate(drafts)]


def make_harness(
    *,
    num_drafts: int = 4,
    num_blocks: int = 40,
    block_size: int = 4,
    caching: bool = False,
    right: bool = True,
    num_right: int = NEVER_WRONG,
    num_state_slots: int = 0,
    ahead_seconds: float | None = None,
    **config: Any,
) -> SchedulerHarness:
    """Create a scheduler with steps of one second, or ``ahead_seconds`` if planned asynchronously.

    None: never async.
    """
    is_ahead = ahead_seconds is not None
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 150, **config}
    harness = SchedulerHarness(
        SchedulerConfig(**limits, speculative=speculative_config(num_drafts), async_scheduling=is_ahead),
        CacheConfig(
            block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=caching, num_state_slots=num_state_slots
        ),
        depth=1 + is_ahead,
        drafts=0,
    )
    if right:
        harness.proposer = None
        ahead = KnownAheadTimes(ahead_seconds or 1.0)
        speculate(harness.scheduler, RightDrafts(harness, num_right), async_planning=ahead)
    return harness


def test_right_drafts_are_generated_at_once() -> None:
    harness = make_harness(num_drafts=4)
    harness.submit("a", make_prompt(0, 6), 21)
    assert harness.run() == 1 + 4  # one step for the prompt, then 5 tokens per step
    assert [sum(plan.num_scheduled_tokens.values()) for plan in harness.plans] == [6, 5, 5, 5, 5]
    harness.drain()


def test_drafts_use_only_the_token_budget_left_by_prompts() -> None:
    harness = make_harness(num_drafts=4, max_num_batched_tokens=8)
    harness.submit("a", make_prompt(0, 4), 40)
    harness.step()
    harness.submit("b", make_prompt(1, 19), 4)
    shares = [dict(harness.step().num_scheduled_tokens) for _ in range(4)]
    assert shares == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 3, "b": 5}, {"a": 5, "b": 3}]
    harness.drain()


def test_drafts_of_several_share_the_rows_that_sample() -> None:
    harness = make_harness(num_drafts=60, max_num_batched_tokens=128, max_num_seqs=4, num_blocks=100)
    assert harness.config.max_sample_rows == 64
    for i in range(3):
        harness.submit(f"r{i}", make_prompt(i, 4), 100)
    for _ in range(4):
        plan = harness.step()  # the first steps have fewer drafts, before acceptance is measured
    assert sum(len(d) for d in plan.scheduled_spec_decode_tokens.values()) == 61
    harness.drain()


def test_drafts_use_free_blocks_without_preempting_requests() -> None:
    harness = make_harness(num_drafts=8, num_blocks=5, block_size=4, max_num_seqs=2, max_model_len=20)
    harness.submit("a", make_prompt(0, 7), 13)
    harness.submit("b", make_prompt(1, 7), 4)
    harness.step()
    assert harness.scheduler.blocks.num_free_blocks == 1
    # Row 8 of each request is in a block that it holds. The first request in the rotation takes the free block.
    ((request_id, drafts),) = harness.step().scheduled_spec_decode_tokens.items()
    assert len(drafts) == {"a": 4, "b": 2}[request_id]
    assert harness.scheduler.num_preemptions == 0
    harness.drain()


def test_scarce_draft_capacity_rotates_among_all_requests() -> None:
    """Requests with equally likely drafts get them in rotation."""
    harness = make_harness(num_drafts=4, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=12)
    for i in range(8):
        harness.submit(f"r{i}", make_prompt(i, 3), 40)
    num_drafts: Counter[str] = Counter()
    while len(harness.live) == 8:
        num_drafts.update({r: len(d) for r, d in harness.step().scheduled_spec_decode_tokens.items()})
    assert len(num_drafts) == 8 and min(num_drafts.values()) * 2 >= max(num_drafts.values())
    harness.drain()


def test_requests_with_likelier_drafts_get_draft_capacity_first() -> None:
    harness = make_harness(num_drafts=4, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=10)
    for i in range(8):
        harness.submit(f"r{i}", make_prompt(i, 3), 30)
        for _ in range(3 * (i >= 6)):
            harness.scheduler.speculation._proposals.acceptance.lookups.tried(f"r{i}", 4, 4)
    while not (plan := harness.step()).scheduled_spec_decode_tokens:
        pass
    assert plan.scheduled_spec_decode_tokens.keys() <= {"r6", "r7"}
    harness.drain()


def test_drafts_of_late_rows_count_as_rejected_drafts_of_the_request() -> None:
    harness = make_harness()
    request = harness.submit("a", make_prompt(0, 6), 20, needs_token_on_host=True)
    harness.step()
    harness.runner.num_late = 1
    harness.step()
    assert request.num_draft_tokens == (4, 0)
    harness.drain()


def test_a_failed_step_no_longer_counts_as_in_flight() -> None:
    """The next step therefore has drafts, and its measured time does not start with the failed step."""
    for fails in ("a step", "the scheduler"):
        harness = make_harness(ahead_seconds=0.9)
        scheduler, clock = harness.scheduler, [0.0]
        times, ahead = StepTimes(lambda clock=clock: clock[0]), AsyncPlanning(lambda clock=clock: clock[0])
        speculate(scheduler, RightDrafts(harness), times, async_planning=ahead)
        harness.submit("a", make_prompt(0, 6), 40)
        harness.step()
        clock[0] += 100
        if fails == "a step":
            harness.fail_oldest()
        else:
            harness.abort("a")
            harness.in_flight.clear()
            scheduler.failed()
        assert not scheduler.speculation._steps and not ahead._planned
        assert times.end() == 0.0
        harness.submit("b", make_prompt(1, 6), 40)
        harness.drain()


def test_a_request_can_do_without() -> None:
    harness = make_harness()
    harness.submit("a", make_prompt(0, 6), 10, options=RequestOptions(use_speculation=False))
    harness.run()
    assert not any(plan.scheduled_spec_decode_tokens for plan in harness.plans)
    harness.drain()


def test_a_token_that_is_computed_again_has_no_drafts() -> None:
    harness = make_harness()
    harness.submit("a", make_prompt(0, 6), 20, needs_token_on_host=True)
    harness.step()
    harness.runner.num_late = 2
    assert [len(harness.step().scheduled_spec_decode_tokens.get("a", ())) for _ in range(4)] == [4, 0, 0, 4]
    harness.drain()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_accepted_tokens_are_cached(block_size: int) -> None:
    """The second turn of a conversation finds all blocks that the first turn has computed, as without speculation."""
    found = []
    for num_drafts in (None, 5):
        harness = make_harness(num_drafts=num_drafts or 1, block_size=block_size, num_blocks=160, caching=True)
        if num_drafts is None:
            harness.scheduler.speculation = None
        first = harness.submit("a", make_prompt(0, 6), 33)
        harness.run()
        again = harness.submit("b", [*make_prompt(0, 6), *harness.tracked["a"].token_ids, 5], 3)
        harness.run()
        assert first.num_output_tokens == 33
        found.append(again.num_cached_tokens)
        harness.drain()
    assert found[0] == found[1] == 38 // block_size * block_size


def test_accepted_tokens_are_computed_again_from_the_state_before() -> None:
    """Two of four drafts are always right. The rows of a step start at the first rejected draft."""
    harness = make_harness(num_drafts=4, num_state_slots=8, num_right=2)
    harness.submit("a", make_prompt(0, 6), 40)
    slots, rows = harness.scheduler.states.slots, []
    while harness.live:
        plan = harness.step()
        rows.append((sum(plan.num_scheduled_tokens.values()), len(plan.scheduled_spec_decode_tokens.get("a", ()))))
        assert slots.num_slots - slots.num_available <= 2
    again = [(5, 4), (8, 4), (11, 4), (14, 4), (17, 4), (20, 4), (19, 0)]
    assert rows[:9] == [(6, 0), *again, (5, 4)]
    harness.drain()


# --- steps planned ahead ---


def kinds_of(harness: SchedulerHarness) -> list[str]:
    """Classify each plan: it is empty and waits, has drafts, or is plain."""
    return [
        "waits" if not plan.num_scheduled_tokens else "drafts" if plan.scheduled_spec_decode_tokens else "plain"
        for plan in harness.plans
    ]


def test_steps_wait_for_tokens_if_drafts_are_faster_than_async_planning() -> None:
    harness = make_harness(num_drafts=4, ahead_seconds=0.9)
    harness.submit("a", make_prompt(0, 6), 16)
    harness.run()
    assert kinds_of(harness) == ["plain", "waits", *["drafts", "waits"] * 3]
    harness.drain()


def test_steps_are_planned_asynchronously_if_faster_than_drafts() -> None:
    harness = make_harness(num_drafts=4, ahead_seconds=0.1)
    harness.submit("a", make_prompt(0, 6), 16)
    harness.run()
    assert kinds_of(harness) == ["plain"] * 16 + ["waits"]  # waits for the last token
    harness.drain()


def test_steps_stop_waiting_for_tokens_if_drafts_are_wrong() -> None:
    harness = make_harness(num_drafts=4, ahead_seconds=0.9, num_right=0)
    harness.submit("a", make_prompt(0, 6), 100)
    harness.run()
    kinds = kinds_of(harness)
    assert kinds.count("drafts") <= 10 and kinds[30:90] == ["plain"] * 60
    harness.drain()


def test_prefills_wait_only_for_drafts_in_flight() -> None:
    """They wait only for drafts in flight."""
    harness = make_harness(num_drafts=4, ahead_seconds=0.9, max_num_batched_tokens=8)
    harness.submit("a", make_prompt(0, 6), 60)
    for _ in range(3):
        harness.step()
    harness.submit("b", make_prompt(1, 30), 2)
    for _ in range(6):
        harness.step()
    assert kinds_of(harness) == ["plain", "waits", "drafts", "waits", *["plain"] * 5]
    assert [plan.num_scheduled_tokens.get("b", 0) for plan in harness.plans[4:]] == [7, 7, 7, 7, 2]
    harness.drain()


def test_later_turns_resume_from_correct_states_after_rejected_drafts() -> None:
    limits: dict[str, Any] = {"num_blocks": 400, "block_size": 2, "max_num_seqs": 3, "max_model_len": 400}
    harness = make_harness(right=False, caching=True, num_state_slots=9, num_drafts=3, **limits)
    for turn in range(10):
        for i in range(4):
            prompt = make_prompt(i, 5 + i)
            if turn:
                prompt = [*harness.tracked[f"r{turn - 1}.{i}"].request.token_ids[: -1 - i], 3]
            harness.submit(f"r{turn}.{i}", prompt, 20 + turn % 2)
        harness.run()
    harness.drain()
