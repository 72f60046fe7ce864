"""Scheduler invariants that hold between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_engine.scheduling.token_allotment import is_long, num_remaining

if TYPE_CHECKING:
    from metal_engine.scheduling.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Assert the invariants that hold between steps; for tests and debugging."""
    scheduler.blocks.check_integrity()
    scheduler.states.check_integrity(set(scheduler.running))
    scheduler.images.check_integrity(scheduler.running)
    scheduler.admissions.check_integrity(scheduler.running)
    not_running = {r.request_id for r in (*scheduler.admissions.waiting, *scheduler.admissions.loading.values())}
    assert not_running | scheduler.running.keys() == scheduler.requests.keys()
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    order = [request.sort_key for request in scheduler.running.values()]
    assert order == sorted(order), f"running out of order: {order}"
    held = {request_id for request_id in scheduler.requests if scheduler.blocks.block_ids(request_id)}
    used = {block_id for request_id in held for block_id in scheduler.blocks.block_ids(request_id)}
    assert scheduler.blocks.num_used_blocks == len(used)
    assert held == scheduler.running.keys() == scheduler.held_by_runner
    assert sum(request.is_suspect for request in scheduler.running.values()) <= 1, "several suspects are running"
    for request in scheduler.running.values():
        num_blocks = len(scheduler.blocks.block_ids(request.request_id))
        assert num_blocks >= scheduler.blocks.blocks_for(request.num_computed_tokens)
        num_known = request.num_tokens + request.num_output_placeholders
        assert 0 <= request.num_computed_tokens <= num_known
        assert request.num_registered_blocks * scheduler.blocks.block_size <= request.num_computed_tokens
    rest = [r for r in scheduler.running.values() if not scheduler.states.is_rejected(r)]
    partial = [r for r in rest if num_remaining(r, scheduler.config) > 1]
    num_slots = sum(not scheduler.states.is_prompt_scheduled_whole(request) for request in partial)
    assert num_slots <= scheduler.config.max_num_partial_prefills
    num_long = sum(is_long(num_remaining(r, scheduler.config), scheduler.config) for r in partial)
    assert num_long <= scheduler.config.max_long_partial_prefills
