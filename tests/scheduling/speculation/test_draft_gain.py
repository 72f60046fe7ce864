"""Tests of the comparison of steps with and without a draft head's drafts."""

from __future__ import annotations

import pytest

from metal_engine.scheduling.speculation.draft_gain import DraftGain
from metal_engine.step import UNKNOWN_DRAFT, SchedulerOutput


class Run:
    """Steps of four requests, with drafts wherever the gain allows them.

    Args:
        drafted_seconds: duration of a step with drafts, which yields six tokens. A step without drafts takes one second
            and yields four tokens.
    """

    def __init__(self, drafted_seconds: float) -> None:
        self.now, self.drafted_seconds = 0.0, drafted_seconds
        self.gain = DraftGain(lambda: self.now)
        self.had_drafts: list[bool] = []
        self.num_tokens = 0
        self.gain.ended(-1, 4)

    def step(self) -> None:
        has_drafts = self.gain.may_draft(4)
        plan = SchedulerOutput(len(self.had_drafts))
        if has_drafts:
            plan.scheduled_spec_decode_tokens["a"] = [UNKNOWN_DRAFT]
        self.gain.planned(plan, 4)
        self.now += self.drafted_seconds if has_drafts else 1.0
        self.num_tokens += 6 if has_drafts else 4
        self.gain.ended(plan.step_id, 6 if has_drafts else 4)
        self.had_drafts.append(has_drafts)

    def steps(self, num_steps: int) -> Run:
        for _ in range(num_steps):
            self.step()
        return self

    def pauses(self) -> list[int]:
        """Return the lengths of all pauses between bursts."""
        text = "".join("d" if one else "." for one in self.had_drafts)
        return [len(pause) for pause in text.split("d") if pause]


def test_drafts_that_lose_pause_for_longer_and_longer() -> None:
    run = Run(drafted_seconds=2.0).steps(2200)
    assert run.pauses()[:7] == [8, 32, 64, 128, 256, 512, 512], "the first pause measures steps without drafts"
    assert run.num_tokens / run.now > 0.97 * 4.0
    run.steps(8000)
    assert max(run.pauses()) == 512 and run.num_tokens / run.now > 0.99 * 4.0


def test_drafts_that_win_pause_seldom() -> None:
    run = Run(drafted_seconds=1.2).steps(4000)
    assert run.pauses() == [8, 8, 8, 8]
    assert run.num_tokens / run.now > 0.99 * 6 / 1.2


@pytest.mark.parametrize(("before", "after"), [(2.0, 1.2), (1.2, 2.0)])
def test_draft_gain_adapts_to_changed_step_times(before: float, after: float) -> None:
    run = Run(before).steps(1000)
    run.drafted_seconds = after
    last = run.steps(700).had_drafts[-100:]
    assert sum(last) > 90 if after < 1.5 else sum(last) < 20


def test_draft_gain_is_tracked_per_number_of_requests() -> None:
    run = Run(drafted_seconds=2.0).steps(30)
    assert not run.gain.may_draft(4) and run.gain.may_draft(1)


def test_steps_that_waited_without_drafts_count_as_steps_with_drafts() -> None:
    """With asynchronous scheduling, such a step costs time and yields nothing more."""
    run = Run(drafted_seconds=2.0)
    for step_id in range(16):
        run.gain.planned(SchedulerOutput(step_id), 4, waited=step_id >= 8)
        run.now += 2.0 if step_id >= 8 else 1.0
        run.gain.ended(step_id, 4)
    assert not run.gain.may_draft(4)


def test_failed_steps_are_not_measured() -> None:
    run = Run(drafted_seconds=1.2).steps(16)
    run.gain.planned(SchedulerOutput(16), 4)
    run.gain.failed()
    run.now += 1000
    run.gain.ended(17, 4)
    assert run.steps(100).gain.may_draft(4)
