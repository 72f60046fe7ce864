"""What must be true of every plan, whatever the settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.limits import MAX_PROMPT_ROWS
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import SchedulerOutput

_UNLIMITED = SchedulerConfig(max_num_batched_tokens=1, max_num_seqs=1, max_model_len=1).max_attention_work


def is_plain(config: SchedulerConfig, cache_config: CacheConfig) -> bool:
    """Whether the settings are those of a scheduler without knobs: first come, first served, one after another."""
    return (
        config.max_num_partial_prefills == 1
        and config.long_prefill_token_threshold >= config.max_model_len
        and not config.page_aligned_scheduling
        and config.scheduling_policy == "fcfs"
        and config.max_attention_work == _UNLIMITED
        and not cache_config.enable_prefix_caching
    )


def max_steps(num_tokens: int, config: SchedulerConfig, block_size: int) -> int:
    """Steps that a prompt may take while it is in progress, its turns in the rotation included."""
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
    """Assert what one plan must keep to.

    Args:
        demand: request id -> tokens it could compute before the plan, as if nothing were cached.
        context_lens: running request before the plan -> tokens it had computed.
        again: running requests that compute accepted drafts again: they decode, in several rows.
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

    # Decodes go first: none is left out for a prefill.
    for request_id in scheduler.running:
        if demand[request_id] == 1 and request_id in context_lens and request_id not in decodes:
            assert not prefills, f"{request_id} could have decoded"

    work_left = config.max_attention_work - sum(n * context_lens[r] + n * (n + 1) // 2 for r, n in decodes.items())
    work = sum(n * contexts[r] + n * (n + 1) // 2 for r, n in prefills.items())
    first_alone = len(prefills) == 1 and sum(prefills.values()) <= block_size
    first_over = next(iter(prefills), None)
    if work > max(0, work_left) and not first_alone:
        # Only the first in turn may exceed the cap, by its smallest share; nobody else gets anything then.
        raise AssertionError(f"attention work {work} of {work_left}, {prefills}, first {first_over}")


def without_drafts(plan: SchedulerOutput) -> SchedulerOutput:
    """The plan as it is without its drafts, but for the blocks that they take."""
    drafts = plan.scheduled_spec_decode_tokens
    shares = {r: n - len(drafts.get(r, ())) for r, n in plan.num_scheduled_tokens.items()}
    return replace(plan, num_scheduled_tokens=shares, scheduled_spec_decode_tokens={})


def check_drafts(
    scheduler: Scheduler, plan: SchedulerOutput, demand: dict[str, int], context_lens: dict[str, int]
) -> None:
    """Assert that drafts take what is left: rows, attention work and free blocks; and end where the request does."""
    config = scheduler.config
    drafts_of = plan.scheduled_spec_decode_tokens
    if not drafts_of:
        return
    assert config.speculative is not None
    num_rows = len(plan.sampled_req_ids) + sum(map(len, drafts_of.values()))
    assert num_rows <= config.max_sample_rows
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
    """Whether a waiting request could have had a free slot, a block and sequences to spare, and nobody was admitted.

    Args: as for :func:`check_plan`. Assumes that the plan preempted nobody.
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
    """Earlier arrivals go first, and nothing that could be used is left over.

    With more than one step under way, a preempted request may come back to find its slot taken by a later one, which
    goes on: it could not be planned while its token was under way.

    Args:
        demand: request id -> tokens it could have computed in this step, in order of arrival.
        context_lens: as for :func:`check_plan`.
        num_preemptions: requests preempted by this plan.
        depth: steps that may be under way at once.
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
                    return  # and the one prompt that may be in progress is
                assert share == min(demand[request_id], left), f"{request_id} got {share} of {left}"
            else:
                served_all_before = False
                served_running_before &= not is_running
        left -= share
    oldest = next(iter(demand), None)
    if oldest is not None and demand[oldest] > 0:
        slot_is_taken = depth > 1 and oldest not in context_lens and any(demand[r] > 1 for r in context_lens)
        assert oldest in plan.num_scheduled_tokens or slot_is_taken, "the oldest request does not advance"
    # Room left over and a request that could use it: only the pool may stand in between.
    waiting = next(iter(scheduler.admissions.waiting), None)
    if waiting is not None and not waiting.num_output_placeholders and left > 0 and not num_preemptions:
        blocks = scheduler.blocks
        if len(scheduler.running) < scheduler.config.max_num_seqs:
            reserve = blocks.num_blocks // 100
            assert blocks.num_free_blocks < blocks.blocks_for(waiting.num_tokens) + reserve, (
                f"{waiting} could have been admitted"
            )


def demand_of(request: Request) -> int:
    """Tokens a request could compute now: those that are known or under way, less those computed."""
    if request.num_output_tokens + request.num_output_placeholders >= request.max_tokens:
        return 0
    if request.num_output_placeholders and request.sampling_params.needs_token_on_host:
        return 0
    if request.status is not RequestStatus.RUNNING and request.num_output_placeholders:
        return 0  # preempted while its token is under way
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
