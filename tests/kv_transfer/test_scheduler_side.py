"""The scheduler's handling of KV from a store: partial loads, deadlines, failures, aborts, preemption."""

from __future__ import annotations

import pytest

from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.request import Request, RequestOptions, RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tests.support.fake_kv_runner import make_prompt
from tests.support.fake_kv_transfer import FakeTransfer
from tests.support.scheduler_harness import SchedulerHarness

BLOCK_SIZE = 4


def make_harness(
    transfer: FakeTransfer | None = None,
    *,
    num_blocks: int = 64,
    budget: int = 64,
    partial: int = 8,
    depth: int = 1,
    max_num_seqs: int = 8,
    num_state_slots: int = 0,
) -> SchedulerHarness:
    return SchedulerHarness(
        SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=200,
            max_num_partial_prefills=partial,
        ),
        CacheConfig(
            block_size=BLOCK_SIZE, num_blocks=num_blocks, enable_prefix_caching=True, model_fingerprint="m",
            num_state_slots=num_state_slots,
        ),
        depth=depth,
        transfer=transfer,
    )  # fmt: skip


def warm_store(*prompts: list[int], config: KVTransferConfig | None = None, num_state_slots: int = 0) -> FakeTransfer:
    """Return a transfer whose store has the KV of these prompts, as saved by another engine."""
    producer = FakeTransfer()
    harness = make_harness(producer, num_state_slots=num_state_slots)
    for i, prompt in enumerate(prompts):
        harness.submit(f"p{i}", prompt, 1)
    harness.drain()
    transfer = FakeTransfer(config)
    transfer.store = producer.store
    return transfer


def test_one_step_combines_complete_partial_and_failed_loads() -> None:
    prompts = [make_prompt(seed, 41) for seed in range(4)]  # ten blocks and one token
    transfer = warm_store(*prompts)
    harness = make_harness(transfer, budget=128)
    for i, prompt in enumerate(prompts):
        harness.submit(f"r{i}", prompt, 5)
    harness.submit("short", make_prompt(9, 3), 3)  # has no full block, so no block can be found
    assert [r.status for r in harness.scheduler.admissions.loading.values()] == [
        RequestStatus.WAITING_FOR_REMOTE_KVS
    ] * 4

    plan = harness.step()
    assert plan.num_scheduled_tokens == {"short": 3}, "nobody waits for a neighbour's transfer"

    whole, part, nothing, failing = transfer.open_tickets
    transfer.deliver(whole)
    transfer.deliver(part, 6)
    part.is_done = True
    nothing.is_done = True
    transfer.deliver(failing, 3)
    transfer.fail(failing)
    plan = harness.step()
    assert plan.num_scheduled_tokens == {"short": 1, "r0": 1, "r1": 17, "r2": 41, "r3": 29}
    assert len(plan.sampled_req_ids) == 5, "all of them have their next token from this one step"
    assert plan.kv_connector_metadata is not None and len(plan.kv_connector_metadata.loads) == 10 + 6 + 3
    harness.drain()
    stats = transfer.stats
    assert (stats.prompt_tokens_store, stats.prompt_tokens_computed) == (76, 3 + 1 + 17 + 41 + 29 + 1)


def test_a_missing_block_ends_the_loaded_prefix_unless_cached_locally() -> None:
    prompt = make_prompt(0, 41)
    transfer = warm_store(prompt)
    hashes = list(transfer.store)
    harness = make_harness(transfer)
    # The first five blocks enter the cache here. The store then loses two blocks: a cached one, and one that is not
    # cached.
    harness.submit("first", prompt[:21], 1)
    transfer.deliver(transfer.open_tickets[0])
    harness.run()
    del transfer.store[hashes[2]], transfer.store[hashes[8]]
    harness.submit("second", prompt, 1)
    transfer.deliver(transfer.open_tickets[0])
    assert harness.step().new_requests[0].num_computed_tokens == 32
    request = harness.tracked["second"].request
    assert (request.num_cached_tokens, request.num_external_tokens) == (32, 12)
    harness.drain()


def test_blocks_cached_beyond_a_hole_are_shared() -> None:
    """The pool has lost the middle of a prompt, and the store has exactly these blocks."""
    prompt = make_prompt(0, 33)
    transfer = warm_store(prompt)
    hashes = list(transfer.store)
    harness = make_harness(transfer)
    harness.submit("first", prompt, 1)
    transfer.deliver(transfer.open_tickets[0])
    harness.run()
    blocks = harness.scheduler.blocks
    for block_hash in hashes[3:5]:
        blocks._forget(blocks._cached[block_hash])
    transfer.store = {h: transfer.store[h] for h in hashes[3:5]}
    harness.submit("second", prompt, 4)
    (ticket,) = transfer.open_tickets
    assert ticket.hashes == hashes[3:5]
    transfer.deliver(ticket)
    plan = harness.step()
    assert plan.num_scheduled_tokens == {"second": 1} and plan.kv_connector_metadata is not None
    assert list(plan.kv_connector_metadata.loads) == plan.new_requests[0].block_ids[3:5]
    harness.drain()


def test_a_load_past_the_deadline_uses_the_blocks_that_have_arrived() -> None:
    prompt = make_prompt(0, 41)
    transfer = warm_store(prompt, config=KVTransferConfig(kv_connector="fake", load_timeout=10, handover_timeout=30))
    harness = make_harness(transfer)
    harness.submit("r", prompt, 3)
    transfer.deliver(transfer.open_tickets[0], 4)
    transfer.now = 9.9
    assert not harness.step().num_scheduled_tokens
    transfer.now = 10.1
    assert harness.step().num_scheduled_tokens == {"r": 25}
    assert transfer.stats.loads_timed_out == 1 and not transfer.tickets
    harness.drain()


def test_a_handover_does_not_time_out_while_blocks_arrive() -> None:
    prompt = make_prompt(0, 41)
    store = warm_store(prompt).store
    transfer = FakeTransfer(KVTransferConfig(kv_connector="fake", load_timeout=1, handover_timeout=30))
    harness = make_harness(transfer)
    harness.submit("r", prompt, 3, options=RequestOptions(do_remote_prefill=True))
    for block_hash, data in store.items():
        transfer.now += 20.0
        assert not harness.step().num_scheduled_tokens
        transfer.store[block_hash] = data
        transfer.deliver(transfer.tickets[0])
    assert harness.step().num_scheduled_tokens == {"r": 1}
    harness.drain()


def test_a_handover_times_out_if_the_producer_sends_no_further_blocks() -> None:
    prompt = make_prompt(0, 41)
    transfer = FakeTransfer(KVTransferConfig(kv_connector="fake", load_timeout=1, handover_timeout=30))
    transfer.store = dict(list(warm_store(prompt).store.items())[:4])
    harness = make_harness(transfer)
    harness.submit("r", prompt, 3, options=RequestOptions(do_remote_prefill=True))
    transfer.deliver(transfer.tickets[0])
    assert not harness.step().num_scheduled_tokens
    transfer.now = 30.1
    assert harness.step().num_scheduled_tokens == {"r": 25}
    harness.drain()


def test_host_memory_is_taken_until_a_request_is_admitted() -> None:
    """Requests that wait for a place in the pool keep their loaded KV. Its total must not exceed the limit."""
    transfer = warm_store(make_prompt(0, 41), make_prompt(1, 41))
    harness = make_harness(transfer, num_blocks=12)
    harness.submit("first", make_prompt(0, 41), 4)
    harness.submit("second", make_prompt(1, 41), 4)
    for ticket in transfer.open_tickets:
        transfer.deliver(ticket)
    harness.step()
    assert [ticket.request_id for ticket in transfer.held] == ["second"]
    harness.run(until=lambda: len(harness.live) == 1)
    harness.step()
    assert not transfer.held and "second" in harness.scheduler.running
    harness.drain()


def test_no_producer_is_waited_for_after_preemption() -> None:
    """The producer computed the prompt. No producer is computing the tokens that the request has generated since."""
    prompt = make_prompt(0, 21)
    transfer = warm_store(prompt, config=KVTransferConfig(kv_connector="fake", kv_role="kv_consumer"))
    harness = make_harness(transfer)
    harness.submit("r", prompt, 20, options=RequestOptions(do_remote_prefill=True))
    assert transfer.open_tickets[0].follow
    transfer.deliver(transfer.open_tickets[0])
    harness.run(until=lambda: harness.tracked["r"].request.num_tokens == 33)
    harness.scheduler.preempt_all()
    (ticket,) = transfer.open_tickets
    assert len(ticket.hashes) == 8 and not ticket.follow
    transfer.deliver(ticket)
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_producer_saves_chunk_by_chunk(depth: int) -> None:
    transfer = FakeTransfer(KVTransferConfig(kv_connector="fake", kv_role="kv_producer"))
    harness = make_harness(transfer, budget=8, depth=depth)
    harness.submit("r", make_prompt(0, 41), 9)
    num_stored = []
    while harness.live:
        harness.step()
        num_stored.append(len(transfer.store))
    assert num_stored[:6] == [2, 4, 6, 8, 10, 10]
    assert num_stored[-1] == (41 + 9 - 1) // BLOCK_SIZE, "and what it generates, block by block"
    assert not transfer.tickets, "a producer does not load"
    harness.drain()


def test_a_consumer_does_not_save() -> None:
    transfer = FakeTransfer(KVTransferConfig(kv_connector="fake", kv_role="kv_consumer"))
    harness = make_harness(transfer)
    harness.submit("r", make_prompt(0, 41), 9)
    transfer.tickets[0].is_done = True
    harness.drain()
    assert not transfer.store


def test_a_producer_hands_over_blocks_that_were_cached_earlier() -> None:
    transfer = FakeTransfer(KVTransferConfig(kv_connector="fake", kv_role="kv_producer"))
    harness = make_harness(transfer)
    prompt = make_prompt(0, 41)
    harness.submit("before", prompt, 1)
    harness.run()
    transfer.store.clear()
    harness.submit("plain", prompt, 1)
    harness.run()
    assert not transfer.store
    harness.submit("handed over", prompt, 1, options=RequestOptions(do_remote_decode=True))
    harness.run()
    assert len(transfer.store) == 10
    harness.drain()


def test_blocks_loaded_from_the_store_are_not_saved_again() -> None:
    prompt = make_prompt(0, 41)
    transfer = warm_store(prompt)
    transfer.answer_at_once()
    harness = make_harness(transfer)
    harness.submit("r", prompt, 1)
    meta = harness.step().kv_connector_metadata
    assert meta is not None and len(meta.loads) == 10 and not meta.saves
    harness.drain()


def test_a_full_queue_drops_saves_and_counts_them() -> None:
    transfer = FakeTransfer()
    transfer.capacity = 3
    harness = make_harness(transfer)
    harness.submit("r", make_prompt(0, 41), 1)
    transfer.answer_at_once()
    harness.drain()
    assert (len(transfer.store), transfer.stats.blocks_dropped) == (3, 7)


def test_requests_that_need_every_prompt_row_do_not_load() -> None:
    transfer = warm_store(make_prompt(0, 41))
    harness = make_harness(transfer)
    harness.submit("r", make_prompt(0, 41), 2, needs_prompt_rows=True)
    assert not transfer.tickets
    assert harness.step().num_scheduled_tokens == {"r": 41}
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_state_is_loaded_over_one_that_the_step_reads(depth: int) -> None:
    """With as many slots as requests, the only slot for a state from the store is a state checkpoint's slot."""
    here, stored = make_prompt(1, 9), make_prompt(2, 9)
    transfer = warm_store(stored, num_state_slots=32)
    harness = make_harness(transfer, depth=depth, max_num_seqs=2, num_state_slots=2)
    first = harness.submit("first", here, 4)
    transfer.open_tickets[0].is_done = True
    harness.run()  # ends at a block boundary, so that its state stays as a state checkpoint
    harness.submit("reader", first.token_ids, 4)
    harness.submit("loader", stored, 4)
    transfer.deliver(transfer.open_tickets[0])
    (reader,), (loader,) = (plan.new_requests for plan in [harness.step(), harness.step()])
    assert (reader.num_computed_tokens, loader.num_computed_tokens) == (12, 8)
    assert reader.state_slots[0] == loader.state_slots[1], "there was no other slot"
    harness.drain()


def test_blocks_that_are_freed_are_not_saved_any_more() -> None:
    connector = FakeTransfer().connector()
    going, staying = (Request(r, [1] * 9, SamplingParams(), max_tokens=1) for r in ("going", "staying"))
    connector.queue_saves(going, [b"a", b"b"], [0, 1])
    connector.queue_saves(staying, [b"c"], [2])
    connector.forget_request(going)
    meta = connector.build_connector_meta()
    assert meta is not None and meta.saves == [(b"c", 2)]
