"""Checks that every plan must pass, for all settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.token_allotment import MAX_PROMPT_ROWS
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import SchedulerOutput

_UNLIMITED = SchedulerConfig(max_num_batched_tokens=1, max_num_seqs=1, max_model_len=1).max_attention_work


def is_plain(config: SchedulerConfig, cache_config: CacheConfig) -> bool:
    """Return True if the settings give a plain scheduler: first come, first served, with one prefill at a time."""
    return (
        config.max_num_partial_prefills == 1
        and config.long_prefill_token_threshold >= config.max_model_len
        and not config.page_aligned_scheduling
        and config.scheduling_policy == "fcfs"
        and config.max_attention_work == _UNLIMITED
        and not cache_config.enable_prefix_caching
    )


def max_steps(num_tokens: int, config: SchedulerConfig, block_size: int) -> int:
    """Return the maximum number of steps for a prompt in progress, with the steps of other prompts in the rotation."""
    smallest = min(block_size, config.max_num_batched_tokens)
    if config.max_num_partial_prefills == 1 and config.max_attention_work == _UNLIMITED:
        smallest = config.max_num_batched_tokens
        smallest -= smallest % block_size if config.page_aligned_scheduling else 0
    return (-(-num_tokens // smallest) + 1) * config.max_num_partial_prefills


def check_plan(
    scheduler: Scheduler,
    plan: SchedulerOutput,
    demand: dict[str, int],
    context_lens: dict[str, int],
    again: Collection[str] = (),
) -> None:
    """Assert the invariants of one plan.

    Args:
        demand: request id -> tokens that the request could compute before the plan if no prefix were cached.
        context_lens: running request before the plan -> number of its computed tokens.
        again: running requests that recompute accepted drafts. They decode in several rows.
    """
    config = scheduler.config
    block_size = scheduler.blocks.block_size
    cached = {new.request_id: new.num_computed_tokens for new in plan.new_requests}
    decodes = {
        r: n for r, n in plan.num_scheduled_tokens.items() if r in again or (r in context_lens and demand[r] == 1)
    }
    if any(n != demand[r] for r, n in decodes.items()):
        assert sum(decodes.values()) == config.max_num_batched_tokens, "a part of what is to be computed again"
    prefills = {r: n for r, n in plan.num_scheduled_tokens.items() if r not in decodes}
    remaining = {r: demand[r] - cached.get(r, 0) for r in prefills}
    contexts = {r: cached[r] if r in cached else context_lens[r] for r in prefills}

    for request_id, num_cached_tokens in cached.items():
        assert num_cached_tokens % block_size == 0, f"{request_id}: {num_cached_tokens} tokens cached"
        assert 0 <= num_cached_tokens < demand[request_id], "nothing is left to compute"
        assert not num_cached_tokens or scheduler.prefix_cache.is_enabled

    threshold = config.long_prefill_token_threshold
    num_long = sum(n > threshold for n in remaining.values())
    assert num_long <= config.max_long_partial_prefills, f"{num_long} long prompts in a step"

    unit = block_size if config.page_aligned_scheduling else 1
    charged = sum(decodes.values()) + sum(-(-n // unit) * unit for n in prefills.values())
    assert charged <= config.max_num_batched_tokens
    for request_id, n in prefills.items():
        assert 0 < n <= remaining[request_id]
        if n < remaining[request_id]:
            assert (contexts[request_id] + n) % unit == 0, f"{request_id}: a chunk ends inside a block"

    # Decodes have priority over prefills.
    for request_id in scheduler.running:
        if demand[request_id] == 1 and request_id in context_lens and request_id not in decodes:
            assert not prefills, f"{request_id} could have decoded"

    work_left = config.max_attention_work - sum(n * context_lens[r] + n * (n + 1) // 2 for r, n in decodes.items())
    work = sum(n * contexts[r] + n * (n + 1) // 2 for r, n in prefills.items())
    first_alone = len(prefills) == 1 and sum(prefills.values()) <= block_size
    first_over = next(iter(prefills), None)
    if work > max(0, work_left) and not first_alone:
        # Only the first prefill may exceed the cap, by its smallest allotment. Other prefills then get no tokens.
        raise AssertionError(f"attention work {work} of {work_left}, {prefills}, first {first_over}")


def without_drafts(plan: SchedulerOutput) -> SchedulerOutput:
    """Return the plan without its drafts. Blocks allocated for drafts stay in the plan."""
    drafts = plan.scheduled_spec_decode_tokens
    shares = {r: n - len(drafts.get(r, ())) for r, n in plan.num_scheduled_tokens.items()}
    return replace(plan, num_scheduled_tokens=shares, scheduled_spec_decode_tokens={})


def check_drafts(
    scheduler: Scheduler, plan: SchedulerOutput, demand: dict[str, int], context_lens: dict[str, int]
) -> None:
    """Assert that drafts use only spare rows, attention work and free blocks, and end at the request's last token."""
    config = scheduler.config
    drafts_of = plan.scheduled_spec_decode_tokens
    if not drafts_of:
        return
    assert config.speculative is not None
    assert len(plan.sampled_req_ids) + sum(map(len, drafts_of.values())) <= config.max_sample_rows
    cached = {new.request_id: new.num_computed_tokens for new in plan.new_requests}
    work = 0
    for request_id, n in plan.num_scheduled_tokens.items():
        context_len = cached[request_id] if request_id in cached else context_lens[request_id]
        work += n * context_len + n * (n + 1) // 2
    assert work <= config.max_attention_work
    for request_id, drafts in drafts_of.items():
        request = scheduler.requests[request_id]
        assert 1 <= len(drafts) <= config.speculative.num_speculative_tokens
        assert plan.num_scheduled_tokens[request_id] == demand[request_id] - cached.get(request_id, 0) + len(drafts)
        assert request.num_output_tokens + 1 + len(drafts) <= request.max_tokens
        assert not request.stop_token_id_set.intersection(drafts), "nothing comes after a token that ends a request"
        assert request.num_registered_blocks * scheduler.blocks.block_size <= request.num_tokens


def was_passed_over(
    scheduler: Scheduler,
    plan: SchedulerOutput,
    demand: dict[str, int],
    context_lens: dict[str, int],
    again: Collection[str] = (),
) -> bool:
    """Return True if no request was admitted although the head of the queue had a slot, a block and sequence capacity.

    Assumes that the plan preempted no request. The arguments are those of :func:`check_plan`.
    """
    config, blocks = scheduler.config, scheduler.blocks
    prefills = [demand[r] for r in context_lens if demand[r] > 1 and r not in again]
    may_be_long = sum(n > config.long_prefill_token_threshold for n in prefills) < config.max_long_partial_prefills
    head = scheduler.admissions.waiting.head(include_long=may_be_long)
    num_decodes = sum(demand[r] for r in context_lens if demand[r] == 1 or r in again)
    unit = blocks.block_size if config.page_aligned_scheduling else 1
    return (
        not plan.new_requests
        and head is not None
        and not head.num_output_placeholders
        and len(prefills) < config.max_num_partial_prefills
        and len(scheduler.running) < config.max_num_seqs
        and config.max_num_batched_tokens - num_decodes >= unit
        and blocks.num_free_blocks >= blocks.blocks_for(head.num_tokens) + blocks.num_blocks // 100
    )


def check_fcfs(
    scheduler: Scheduler,
    plan: SchedulerOutput,
    demand: dict[str, int],
    context_lens: dict[str, int],
    num_preemptions: int,
    depth: int,
) -> None:
    """Assert that earlier arrivals go first and that no usable budget is left.

    With more than one step in flight, a preempted request can find its slot taken by a later request, which keeps the
    slot. The preempted request could not be planned while its token was in flight.

    Args:
        demand: request id -> tokens that the request could have computed in this step, in order of arrival.
        context_lens: running request before the plan -> number of its computed tokens.
        num_preemptions: number of requests preempted by this plan.
        depth: maximum number of steps in flight.
    """
    order = list(demand)
    order.sort(key=lambda r: demand[r] != 1 or r not in context_lens)  # decodes go first
    packed = list(plan.num_scheduled_tokens)
    scheduled = set(packed)
    assert packed == [r for r in order if r in scheduled], "not packed decodes first, in order of arrival"
    left = scheduler.config.max_num_batched_tokens
    asking = {r for r in demand if scheduler.requests[r].needs_prompt_rows}
    served_all_before = served_running_before = True
    for request_id in order:
        share = plan.num_scheduled_tokens.get(request_id, 0)
        is_running = request_id in context_lens
        if demand[request_id] > 0:
            if share:
                in_turn = served_running_before if is_running and depth > 1 else served_all_before
                assert in_turn, f"{request_id} overtook an earlier arrival"
                if share < min(demand[request_id], left) and request_id in asking:
                    num_rows = sum(plan.num_scheduled_tokens.get(r, 0) for r in asking)
                    assert num_rows == MAX_PROMPT_ROWS, f"{request_id} got {share} of {left}, with {num_rows} rows"
                    return  # this prompt takes the only prefill slot
                assert share == min(demand[request_id], left), f"{request_id} got {share} of {left}"
            else:
                served_all_before = False
                served_running_before &= not is_running
        left -= share
    oldest = next(iter(demand), None)
    if oldest is not None and demand[oldest] > 0:
        # Requests of a failed step wait again. Later requests of another step keep running.
        has_failed = scheduler.requests[oldest].num_failures > 0
        is_waiting = oldest not in context_lens
        slot_is_taken = is_waiting and any(has_failed or (depth > 1 and demand[r] > 1) for r in context_lens)
        assert oldest in plan.num_scheduled_tokens or slot_is_taken, "the oldest request does not advance"
    # If budget is left and a waiting request could use it, only a lack of blocks can be the reason.
    waiting = next(iter(scheduler.admissions.waiting), None)
    if waiting is not None and not waiting.num_output_placeholders and left > 0 and not num_preemptions:
        blocks = scheduler.blocks
        if len(scheduler.running) < scheduler.config.max_num_seqs:
            reserve = blocks.num_blocks // 100
            assert blocks.num_free_blocks < blocks.blocks_for(waiting.num_tokens) + reserve, (
                f"{waiting} could have been admitted"
            )


def demand_of(request: Request) -> int:
    """Return the number of tokens that a request could compute now: known tokens and placeholders, minus computed."""
    if request.num_output_tokens + request.num_output_placeholders >= request.max_tokens:
        return 0
    if request.num_output_placeholders and request.sampling_params.needs_token_on_host:
        return 0
    if request.status is not RequestStatus.RUNNING and request.num_output_placeholders:
        return 0  # preempted while its token is in flight
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
