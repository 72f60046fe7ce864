"""State machine of scheduling with a KV store: blocks arrive completely, partially, late or never, in any order.

The fake runner stores its KV in the store. A block that is loaded to a wrong place, saved too early, or saved after its
reuse therefore leads to a wrong token.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.request import RequestOptions
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tests.scheduling.test_scheduler_stateful import _QUICK, SchedulerMachine
from tests.support.fake_kv_runner import make_prompt
from tests.support.fake_kv_transfer import FakeTransfer
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.speculation import speculative_config


class KVMachine(SchedulerMachine):
    is_recurrent = False
    is_speculative = False

    @initialize(data=st.data())
    def start_engine(self, data: st.DataObject) -> None:  # type: ignore[override]
        def draw(strategy, label):  # type: ignore[no-untyped-def]
            return data.draw(strategy, label=label)

        block_size = draw(st.sampled_from([1, 2, 4, 16]), "block_size")
        num_blocks = draw(st.integers(2, 60), "num_blocks")
        partial = draw(st.sampled_from([1, 2, 4]), "partial")
        role = draw(st.sampled_from(["kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer"]), "role")
        config = KVTransferConfig(kv_connector="fake", kv_role=role, load_timeout=2.0, handover_timeout=5.0)
        self.transfer = FakeTransfer(config)
        max_num_seqs = draw(st.integers(1, 8), "max_num_seqs")
        num_slots = draw(st.integers(max_num_seqs, 4 * max_num_seqs), "num_slots") if self.is_recurrent else 0
        self.drafts = draw(st.integers(0, 1 << 16), "drafts") if self.is_speculative else None
        self.depth = draw(st.integers(1, 3), "depth")
        self.engine = (
            SchedulerConfig(
                max_num_batched_tokens=draw(st.one_of(st.integers(1, 64), st.just(512)), "budget"),
                max_num_seqs=max_num_seqs,
                max_model_len=400,
                max_num_partial_prefills=partial,
                scheduling_policy=draw(st.sampled_from(["fcfs", "priority"]), "policy"),
                async_scheduling=self.depth > 1,
                speculative=None if self.drafts is None else speculative_config(draw(st.integers(1, 6), "num_drafts")),
            ),
            CacheConfig(
                block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=True, model_fingerprint="fake",
                num_state_slots=num_slots,
            ),
        )  # fmt: skip
        self.capacity = min(400, block_size * num_blocks + 1)
        self.num_requests = 0
        self.start()

    def start(self) -> None:
        self.harness = SchedulerHarness(*self.engine, depth=self.depth, transfer=self.transfer, drafts=self.drafts)

    def submit(self, prompt: list[int], max_tokens: int, **kwargs: object) -> None:  # type: ignore[override]
        digest = len(prompt) * 31 + max_tokens * 7 + self.num_requests
        options = RequestOptions(
            priority=digest % 3 - 1, do_remote_prefill=digest % 4 == 0, do_remote_decode=digest % 3 == 0
        )
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        if len(prompt) + max_tokens <= self.capacity:
            self.harness.submit(
                request_id, prompt, max_tokens, options=options, needs_prompt_rows=digest % 11 == 0, **kwargs
            )
        self.harness.scheduler.check_integrity()

    @rule(seed=st.integers(0, 2), other=st.integers(3, 5), data=st.data(), max_tokens=st.integers(1, 12))
    def arrive_with_a_shared_beginning(self, seed: int, other: int, data: st.DataObject, max_tokens: int) -> None:
        common = data.draw(st.integers(1, max(1, self.capacity - 1)), label="common")
        tail = data.draw(st.integers(0, max(0, min(40, self.capacity - common - 1))), label="tail")
        self.submit(make_prompt(seed, common) + make_prompt(other, tail), max_tokens)

    @precondition(lambda self: self.transfer.open_tickets)
    @rule(data=st.data(), num_blocks=st.integers(1, 20))
    def arrive_from_store(self, data: st.DataObject, num_blocks: int) -> None:
        tickets = self.transfer.open_tickets
        self.transfer.deliver(tickets[data.draw(st.integers(0, len(tickets) - 1), label="which")], num_blocks)

    @precondition(lambda self: self.transfer.open_tickets)
    @rule()
    def everything_arrives(self) -> None:
        for ticket in self.transfer.open_tickets:
            self.transfer.deliver(ticket)

    @precondition(lambda self: self.transfer.open_tickets)
    @rule(data=st.data())
    def load_fails(self, data: st.DataObject) -> None:
        self.transfer.fail(data.draw(st.sampled_from(self.transfer.open_tickets)))

    @rule(seconds=st.sampled_from([0.1, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.transfer.now += seconds

    @precondition(lambda self: self.transfer.store)
    @rule(data=st.data())
    def store_loses_blocks(self, data: st.DataObject) -> None:
        kept = data.draw(st.integers(0, 3), label="keep one of")
        for i, block_hash in enumerate(list(self.transfer.store)):
            if kept == 0 or i % (kept + 1) == 0:
                del self.transfer.store[block_hash]

    @rule(capacity=st.sampled_from([0, 1, 3, 1 << 30]))
    def queue_of_saves_fills(self, capacity: int) -> None:
        self.transfer.capacity = capacity

    @rule()
    def step_fails(self) -> None:
        """Drop the cache but not the store, as the engine does after a failed step."""
        self.harness.scheduler.prefix_cache.forget()

    @rule()
    def restart(self) -> None:
        """Stop the engine. A new engine finds the store."""
        while len(self.harness.in_flight) >= self.harness.depth:
            self.harness.update()
        self.harness.drain()
        fresh = FakeTransfer(self.transfer.config)
        fresh.store, self.transfer = self.transfer.store, fresh
        self.start()


class RecurrentKVMachine(KVMachine):
    is_recurrent = True


class SpeculativeKVMachine(KVMachine):
    """Requests have drafts, some of which are rejected. KV of rejected drafts must never reach the store."""

    is_speculative = True


class RecurrentSpeculativeKVMachine(SpeculativeKVMachine):
    """States computed with rejected drafts must not reach the store, either."""

    is_recurrent = True


MACHINES = {KVMachine: 20, RecurrentKVMachine: 12, SpeculativeKVMachine: 10, RecurrentSpeculativeKVMachine: 10}


@pytest.mark.parametrize("machine", MACHINES)
def test_random_traffic(machine: type[KVMachine]) -> None:
    few = settings(_QUICK, max_examples=MACHINES[machine], stateful_step_count=40)
    run_state_machine_as_test(machine, settings=few)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", MACHINES)
def test_much_random_traffic(machine: type[KVMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(_QUICK, max_examples=500, stateful_step_count=60))
