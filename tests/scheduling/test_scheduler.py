"""Tests of the scheduler, one guarantee each. The harness also checks all invariants and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from metal_engine.errors import ContextLengthError, PromptError
from metal_engine.request import Request, RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.token_allotment import check_fits
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import ModelOutput
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness


def make_harness(
    budget: int = 64,
    seqs: int = 8,
    model_len: int = 256,
    block_size: int = 4,
    num_blocks: int = 64,
    depth: int = 1,
    caching: bool = False,
) -> SchedulerHarness:
    return SchedulerHarness(
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs, max_model_len=model_len),
        CacheConfig(block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=caching),
        depth=depth,
    )


def shares(harness: SchedulerHarness) -> dict[str, int]:
    return dict(harness.step().num_scheduled_tokens)


# --- sharing a step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "budget", "prompt_len", "chunks", "num_decodes"),
    [
        (1, 10, 25, [10, 10, 5], 2),
        (1, 10, 20, [10, 10], 0),  # the prompt ends with a whole chunk
        (2, 4, 10, [4, 4, 2], 1),
    ],
)
def test_prefill_is_chunked_and_only_the_last_chunk_samples(
    depth: int, budget: int, prompt_len: int, chunks: list[int], num_decodes: int
) -> None:
    harness = make_harness(budget=budget, depth=depth)
    harness.submit("a", make_prompt(0, prompt_len), 1 + num_decodes)
    steps = chunks + [1] * num_decodes
    plans = [harness.step() for _ in steps]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": n} for n in steps]
    assert [plan.sampled_req_ids for plan in plans] == [[]] * (len(chunks) - 1) + [["a"]] * (1 + num_decodes)
    assert [len(plan.new_requests) for plan in plans] == [1] + [0] * (len(steps) - 1)
    harness.drain()


def test_decodes_and_chunks_share_a_step() -> None:
    harness = make_harness(budget=16)
    harness.submit("a", make_prompt(0, 3), 20)
    harness.submit("b", make_prompt(1, 4), 20)
    assert shares(harness) == {"a": 3, "b": 4}
    harness.submit("c", make_prompt(2, 20), 2)
    harness.submit("d", make_prompt(3, 5), 2)
    harness.submit("e", make_prompt(4, 7), 2)
    assert shares(harness) == {"a": 1, "b": 1, "c": 14}
    plan = harness.step()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1, "c": 6, "d": 5, "e": 3}
    assert plan.sampled_req_ids == ["a", "b", "c", "d"]
    assert shares(harness) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4}
    harness.drain()


# --- the pool runs out --------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_and_resumes_in_order() -> None:
    harness = make_harness(block_size=4, num_blocks=6, seqs=3)
    for i in range(3):
        harness.submit(f"r{i}", make_prompt(i, 8), 8)
    harness.submit("late", make_prompt(3, 4), 2)
    assert list(shares(harness)) == ["r0", "r1", "r2"]
    plan = harness.step()  # r0 needs a third block; r2 is preempted and frees two, and r1 takes the other
    assert list(plan.num_scheduled_tokens) == ["r0", "r1"]
    assert plan.dropped_req_ids == ["r2"]
    r2 = harness.tracked["r2"].request
    assert (r2.status, r2.num_computed_tokens, r2.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert harness.scheduler.num_preemptions == harness.scheduler.stats.num_preemptions == 1
    assert [r.request_id for r in harness.scheduler.admissions.waiting] == ["r2", "late"]
    harness.run(until=lambda: r2.status is RequestStatus.RUNNING)
    new = harness.plans[-1].new_requests[0]
    assert new.request_id == "r2" and new.num_prompt_tokens == 8
    assert new.token_ids == make_prompt(2, 8) + harness.tracked["r2"].expected[:1]
    assert harness.plans[-1].num_scheduled_tokens["r2"] == 9, "its prompt and output are recomputed as one chunk"
    harness.drain()


def test_requests_that_each_fill_the_pool_finish_without_livelock() -> None:
    harness = make_harness(block_size=4, num_blocks=8)
    for i in range(4):
        harness.submit(f"r{i}", make_prompt(i, 5), 28)
    harness.drain()
    # A request is preempted at most once for each earlier request, so there is no thrashing.
    assert harness.scheduler.num_preemptions <= 6


def test_a_request_without_room_is_looked_up_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the cached prefix of a long prompt takes milliseconds."""
    harness = make_harness(budget=16, num_blocks=10, caching=True)
    harness.submit("a", make_prompt(0, 24), 8)
    harness.step()
    harness.submit("b", make_prompt(1, 24), 2)
    prefix_cache = harness.scheduler.prefix_cache
    find, looks = prefix_cache.find, []
    monkeypatch.setattr(prefix_cache, "find", lambda *args: looks.append(args) or find(*args))
    for num_steps in (1, 2, 3):
        harness.step()
        assert len(looks) == num_steps
    assert "b" not in harness.scheduler.running
    harness.drain()


def test_admission_leaves_a_reserve_beside_running_requests_but_not_for_the_first() -> None:
    harness = make_harness(block_size=1, num_blocks=200, budget=400)
    harness.submit("a", make_prompt(0, 100), 5)
    harness.submit("b", make_prompt(1, 99), 5)
    assert list(shares(harness)) == ["a"], "1% of the pool would not stay free"
    harness.drain()
    harness = make_harness(block_size=1, num_blocks=200, budget=400)
    harness.submit("a", make_prompt(0, 200), 1)
    assert list(shares(harness)) == ["a"]


# --- arrival ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "kind", "message"),
    [
        (0, 4, PromptError, "no tokens"),
        (30, 11, ContextLengthError, "maximum context length is 40"),
        (41, 1, ContextLengthError, "maximum context length is 40"),
        (30, 4, PromptError, "needs 9 KV cache blocks .* has only 8"),
    ],
)
def test_check_fits_rejects_requests_that_can_never_run(
    prompt_len: int, max_tokens: int, kind: type[PromptError], message: str
) -> None:
    harness = make_harness(model_len=40, block_size=4, num_blocks=8)
    with pytest.raises(PromptError, match=message) as caught:
        check_fits(prompt_len, max_tokens, harness.config, harness.cache_config)
    assert type(caught.value) is kind


def test_an_id_in_use_is_refused_and_may_be_used_again_later() -> None:
    harness = make_harness()
    harness.submit("a", make_prompt(0, 5), 2)
    with pytest.raises(ValueError, match="in use"):
        harness.submit("a", make_prompt(1, 5), 2)
    harness.run()
    harness.submit("a", make_prompt(1, 6), 3)  # the same plan also drops the old request
    plan = harness.step()
    assert plan.dropped_req_ids == ["a"]
    assert [new.request_id for new in plan.new_requests] == ["a"]
    harness.drain()


# --- the end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "sampled", "num_taken", "finish_reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [5, 6, 7, 8], 3, "length", None),
        ({"max_tokens": 9}, [5, 9, 7], 2, "stop", None),
        ({"max_tokens": 9}, [5, 8, 7], 2, "stop", None),
        ({"max_tokens": 9, "stop_token_ids": (7,)}, [5, 6, 7], 3, "stop", 7),
        # The end of sequence is the last token allowed.
        ({"max_tokens": 2}, [5, 9], 2, "stop", None),
        ({"max_tokens": 4, "ignore_eos": True}, [9, 9, 9, 9], 4, "length", None),
        ({"max_tokens": 4, "ignore_eos": True, "stop_token_ids": (9,)}, [8, 9, 8], 2, "stop", 9),
    ],
)
def test_the_token_that_ends_a_request(
    params: dict[str, Any], sampled: list[int], num_taken: int, finish_reason: str, stop_reason: int | None
) -> None:
    scheduler = make_harness(budget=8, seqs=2, model_len=64, num_blocks=16).scheduler
    request = Request(
        "a", [1, 2], SamplingParams(**params), max_tokens=params["max_tokens"], eos_token_ids=frozenset({8, 9})
    )
    scheduler.add_request(request)
    outputs = []
    for token_id in sampled[:num_taken]:
        assert scheduler.has_requests
        outputs += scheduler.update(scheduler.schedule(), ModelOutput([token_id]))
    assert [token_id for output in outputs for token_id in output.token_ids] == sampled[:num_taken]
    assert [output.finish_reason for output in outputs] == [None] * (num_taken - 1) + [finish_reason]
    assert outputs[-1].stop_reason == stop_reason
    statuses = {"length": RequestStatus.FINISHED_LENGTH, "stop": RequestStatus.FINISHED_STOPPED}
    assert request.status is statuses[finish_reason]
    assert not scheduler.has_requests and scheduler.blocks.num_used_blocks == 0
    scheduler.check_integrity()


def test_a_runner_that_returns_too_few_tokens_is_an_error() -> None:
    harness = make_harness()
    harness.submit("a", [1, 2], 4)
    plan = harness.scheduler.schedule()
    with pytest.raises(ValueError, match="shorter"):
        harness.scheduler.update(plan, ModelOutput([]))


# --- aborts -------------------------------------------------------------------------------------------------


def test_abort_of_an_unknown_id_is_ignored() -> None:
    scheduler = make_harness().scheduler
    scheduler.finish_request("nobody", RequestStatus.FINISHED_ABORTED)
    assert not scheduler.has_requests


# --- two steps under way ------------------------------------------------------------------------------------


def test_pipelined_decodes_run_on_placeholders() -> None:
    harness = make_harness(depth=2)
    request = harness.submit("a", make_prompt(0, 5), 4)
    first, second = harness.schedule(), harness.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 5}, {"a": 1})
    assert first.sampled_req_ids == second.sampled_req_ids == ["a"]
    assert (request.num_tokens, request.num_output_placeholders, request.num_computed_tokens) == (5, 2, 6)
    harness.update()
    assert (request.num_tokens, request.num_output_placeholders) == (6, 1)
    harness.run()
    sampled = [request_id for plan in harness.plans for request_id in plan.sampled_req_ids]
    assert len(sampled) == 4, "as many samples as tokens: none twice, none lost"
    harness.drain()


# --- debugging aids -----------------------------------------------------------------------------------------


def test_stats() -> None:
    harness = make_harness(seqs=2, block_size=4, num_blocks=64)
    for i in range(3):
        harness.submit(f"r{i}", make_prompt(i, 5), 4)
    harness.step()
    stats = harness.scheduler.stats
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (2, 1, 0)
    assert (stats.num_used_blocks, stats.num_blocks) == (4, 64)


CORRUPTIONS: dict[str, Callable[[Scheduler], object]] = {
    "lose a running request": lambda scheduler: scheduler.running.popitem(),
    "let requests wait and run": lambda scheduler: [
        scheduler.admissions.waiting.push(request, is_long=False) for request in scheduler.running.values()
    ],
    "lose a waiting request": lambda scheduler: scheduler.admissions.waiting.remove("r2"),
    "swap running requests": lambda scheduler: setattr(scheduler, "running", dict(reversed(scheduler.running.items()))),
    "compute too far": lambda scheduler: setattr(scheduler.running["r0"], "num_computed_tokens", 105),
    "free blocks of a running request": lambda scheduler: scheduler.blocks.free("r0"),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_check_integrity_notices(corruption: str) -> None:
    harness = make_harness(seqs=2)
    for i in range(4):
        harness.submit(f"r{i}", make_prompt(i, 5), 4)
    harness.step()
    harness.scheduler.check_integrity()
    CORRUPTIONS[corruption](harness.scheduler)
    with pytest.raises(AssertionError):
        harness.scheduler.check_integrity()


def test_host_token_requests_wait_without_blocking_other_requests() -> None:
    harness = make_harness(depth=2)
    harness.submit("ahead", make_prompt(0, 5), 6)
    harness.submit("held back", make_prompt(1, 5), 3, needs_token_on_host=True)
    harness.drain()
    steps = [list(plan.num_scheduled_tokens) for plan in harness.plans if plan.num_scheduled_tokens]
    both = ["ahead", "held back"]
    assert steps[:6] == [both, ["ahead"], both, ["ahead"], both, ["ahead"]]


def test_failed_and_cancelled_plans_are_computed_again() -> None:
    """A step fails while the next step is planned. Only the requests of the failed step have a failure."""
    harness = make_harness(budget=4, seqs=4, depth=2)
    harness.submit("first", make_prompt(0, 4), 1)
    harness.submit("second", make_prompt(1, 4), 5)
    harness.schedule()
    plan = harness.schedule()
    assert list(plan.num_scheduled_tokens) == plan.sampled_req_ids == ["second"]
    harness.fail_oldest()
    requests = harness.scheduler.requests
    assert [requests[r].num_failures for r in ("first", "second")] == [1, 0]
    assert all((r.num_computed_tokens, r.num_output_placeholders) == (0, 0) for r in requests.values())
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_with_a_possibly_recomputed_last_token_is_not_shared(depth: int) -> None:
    """The fake runner detects a write to a block that two requests share."""
    harness = make_harness(depth=depth, caching=True)
    harness.submit("late", make_prompt(0, 8), 6, needs_token_on_host=True)
    harness.runner.num_late = 3
    harness.step()
    harness.submit("same", make_prompt(0, 10), 6)
    harness.drain()
    assert harness.tracked["same"].request.num_cached_tokens == 4
