"""Observing steps: frames match the engine's activity, are limited in size, and cost nothing without observers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from metal_engine.engine.step_observer import MAX_ROWS, Frame, StepObserver
from metal_engine.server.page.events import FRESH, SAMPLES, frame_data, piece_data
from metal_engine.server.page.pool_mirror import PoolMirror, runs_of
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tests.support.fake_kv_runner import make_prompt
from tests.support.pool_picture import PoolPicture
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.speculation import speculative_config


class Look:
    """Observer of a harness from some step on, which receives JSON as the web page does."""

    def __init__(self, harness: SchedulerHarness) -> None:
        self.scheduler = harness.scheduler
        self.frames: list[Frame] = []
        self.mirror = PoolMirror(harness.cache_config.num_blocks)
        self.pictures: list[PoolPicture] = []
        self.watch = StepObserver(harness.scheduler, self._take)
        self.join()

    def _take(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.mirror.apply(frame)
        for picture in self.pictures:
            if frame.forget:
                self._tell_all(picture)
            else:
                self._tell(picture, frame_data(frame, {}))

    def join(self) -> None:
        """Add an observer."""
        self.pictures.append(PoolPicture())
        self._tell_all(self.pictures[-1])

    def _tell_all(self, picture: PoolPicture) -> None:
        requests = [{"key": seen.key} for seen in self.mirror.requests.values()]
        picture.apply("snapshot", {"requests": requests})
        for tables, cached in self.mirror.pieces():
            self._tell(picture, piece_data(tables, cached, self.mirror.is_whole))

    @staticmethod
    def _tell(picture: PoolPicture, data: dict[str, Any]) -> None:
        picture.apply("frame", json.loads(json.dumps(data)))

    def check(self) -> None:
        while self.watch.flush_frames():
            pass
        for picture in self.pictures:
            picture.check(self.scheduler)


def make_harness(
    num_blocks: int = 24, depth: int = 1, slots: int = 0, max_num_seqs: int = 6, drafts: int | None = None
) -> SchedulerHarness:
    speculative = None if drafts is None else speculative_config()
    return SchedulerHarness(
        SchedulerConfig(
            max_num_batched_tokens=24, max_num_seqs=max_num_seqs, max_model_len=80, speculative=speculative
        ),
        CacheConfig(block_size=4, num_blocks=num_blocks, enable_prefix_caching=True, num_state_slots=slots),
        depth=depth,
        drafts=drafts,
    )


def watched_step(harness: SchedulerHarness, look: Look | None, now: float, *, fails: bool = False) -> None:
    plan = harness.schedule()
    if look is not None:
        look.watch.planned(plan, now)
    if harness.in_flight and fails:
        harness.fail_oldest(cache_is_lost=plan.step_id % 2 == 0)
    if len(harness.in_flight) == harness.depth or (harness.in_flight and not plan.num_scheduled_tokens):
        harness.update()


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_frames_reproduce_the_state_of_the_block_pool(seed: int, speculates: bool) -> None:
    """Random load that exhausts the pool, with shared prefixes, aborts and failing steps.

    One observer joins in the middle, a second one later. After each step that is checked, the picture from the frames
    equals the block manager's state.
    """
    rng = random.Random(seed)
    slots = 0 if speculates else rng.choice([0, 0, 24])
    depth = 1 if speculates else 1 + seed % 2
    harness = make_harness(rng.randint(20, 40), depth, slots, drafts=3 * seed if speculates else None)
    look: Look | None = None
    now, num_checks, num_requests = 0.0, 0, 0
    for step in range(160):
        while len(harness.live) < 9 and rng.random() < 0.5:
            prompt = make_prompt(rng.randint(0, 2), rng.randint(1, 50)) + make_prompt(rng.randint(0, 9), 2)
            harness.submit(f"r{num_requests}#{num_requests}", prompt, rng.randint(1, 25), ignore_eos=True)
            num_requests += 1
        if harness.live and rng.random() < 0.05:
            harness.abort(rng.choice(harness.live).request.request_id)
        if step == 20:
            look = Look(harness)
        if look is not None and step == 70:
            look.join()
        now += rng.choice([0.001, 0.2])
        watched_step(harness, look, now, fails=rng.random() < 0.03)
        if look is not None and rng.random() < 0.4:
            look.check()
            num_checks += 1
    assert look is not None and num_checks > 20
    while harness.live or harness.in_flight:
        watched_step(harness, look, now := now + 0.01)
    look.check()
    drafts = [segment[4] for row in look.pictures[0].rows for segment in row["segments"] if len(segment) > 4]
    assert bool(drafts) == speculates
    told = [key for picture in look.pictures[:1] for key in picture.preempted]
    assert told or not harness.scheduler.num_preemptions


def test_a_new_observer_gets_a_full_pool_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_engine.engine.step_observer._BLOCKS_AT_ONCE", 4)
    harness = make_harness(num_blocks=60)
    for i in range(5):
        harness.submit(f"r{i}#{i}", make_prompt(i, 30), 20)
    for _ in range(8):
        harness.step()
    look = Look(harness)
    num_rests = 0
    while look.watch.flush_frames():
        assert not look.pictures[0].is_whole
        num_rests += 1
    assert num_rests >= 60 // 4 - 1
    look.check()


def test_frames_report_the_scheduled_tokens_of_each_request() -> None:
    harness = make_harness()
    look = Look(harness)
    harness.submit("a#0", make_prompt(0, 30), 4)
    harness.submit("b#1", make_prompt(1, 5), 4)
    plans = []
    for i in range(5):
        plan = harness.schedule()
        look.watch.planned(plan, float(i))
        plans.append(plan)
        harness.update()
    look.watch.flush_frames()
    rows = look.pictures[0].rows
    names = {seen.key: seen.request_id for frame in look.frames for seen in frame.requests}
    assert names == {0: "a#0", 1: "b#1"}
    told = [{names[key]: n for key, n, _, _ in row["segments"]} for row in rows]
    assert told == [plan.num_scheduled_tokens for plan in plans]
    assert [row["seconds"] for row in rows[:4]] == [1.0] * 4 and [row["steps"] for row in rows] == [1] * 5
    contexts = [context for row in rows for key, _, context, _ in row["segments"] if names[key] == "a#0"]
    lengths = [plan.num_scheduled_tokens["a#0"] for plan in plans if "a#0" in plan.num_scheduled_tokens]
    assert contexts == [sum(lengths[:i]) for i in range(len(lengths))]
    for row, plan in zip(rows, plans, strict=True):
        flags = {names[key]: bits for key, _, _, bits in row["segments"]}
        assert {r for r in flags if flags[r] & SAMPLES} == set(plan.sampled_req_ids)
        assert {r for r in flags if flags[r] & FRESH} == {new.request_id for new in plan.new_requests}


def test_steps_that_look_alike_are_one_row_and_a_frame_has_few() -> None:
    harness = make_harness(num_blocks=64)
    look = Look(harness)
    for i in range(3):
        harness.submit(f"r{i}#{i}", make_prompt(i, 3), 30, ignore_eos=True)
    num_steps = 0
    while harness.live:
        look.watch.planned(harness.schedule(), 1 + num_steps * 0.001)
        num_steps += 1
        harness.update()
    look.watch.flush_frames()
    assert len(look.pictures[0].rows) <= 6 and sum(row["steps"] for row in look.pictures[0].rows) == num_steps
    for i in range(40):  # each step has a different composition
        harness.submit(f"s{i}#{i}", make_prompt(i, 3), 2)
        look.watch.planned(harness.schedule(), 2 + i * 0.0001)
        harness.update()
    look.watch.flush_frames()
    assert max(len(frame.rows) for frame in look.frames) == MAX_ROWS


def test_frames_report_preemptions_and_finished_requests() -> None:
    harness = make_harness(num_blocks=12)
    look = Look(harness)
    for i in range(3):
        harness.submit(f"r{i}#{i}", make_prompt(i, 10), 14, ignore_eos=True)
    now = 0.0
    while harness.live:
        now += 1
        look.watch.planned(harness.schedule(), now)
        harness.update()
        look.check()
    assert harness.scheduler.num_preemptions
    assert len(look.pictures[0].preempted) == harness.scheduler.num_preemptions
    assert not look.pictures[0].requests and not look.pictures[0].tables
    assert not look.watch._watched


def test_runs() -> None:
    assert runs_of([]) == [] and runs_of([3]) == [(3, 1)]
    assert runs_of([0, 1, 2, 5, 6, 4, 9]) == [(0, 3), (5, 2), (4, 1), (9, 1)]
