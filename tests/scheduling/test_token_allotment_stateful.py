"""Runs the state machine of ``test_scheduler_stateful.py`` with random values of all scheduling settings.

The harness asserts after each step:

- The budget is exact.
- The limits on partial, long and aligned chunks and on attention work hold.
- No step writes to shared blocks.
- Every request gets the same tokens as without other requests.

At the end, it asserts that all requests finish within a bounded number of steps.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from metal_engine.request import RequestOptions
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tests.scheduling.test_scheduler_stateful import _QUICK, SchedulerMachine
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness


class KnobsMachine(SchedulerMachine):
    """Random settings, shared prefixes, salts and priorities, with pools that are too small for the traffic."""

    depths = st.integers(1, 3)
    pool_sizes = st.integers(2, 40)
    token_budgets = st.one_of(st.integers(1, 64), st.just(512))
    model_lens = st.just(400)
    work_caps = st.one_of(st.just(1 << 62), st.integers(1, 5000))

    @initialize(data=st.data())
    def start_engine(self, data: st.DataObject) -> None:  # type: ignore[override]
        def draw(strategy, label):  # type: ignore[no-untyped-def]
            return data.draw(strategy, label=label)

        block_size = draw(st.sampled_from([1, 2, 4, 16]), "block_size")
        aligned = draw(st.booleans(), "aligned")
        max_num_seqs = draw(st.integers(1, 8), "max_num_seqs")
        budget = draw(self.token_budgets, "budget")
        if aligned:
            budget = max(budget, max_num_seqs + block_size)
        partial = draw(st.sampled_from([1, 2, 4, 16]), "partial")
        self.harness = SchedulerHarness(
            SchedulerConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                max_model_len=draw(self.model_lens, "max_model_len"),
                max_num_partial_prefills=partial,
                max_long_partial_prefills=draw(st.integers(1, partial), "long"),
                long_prefill_token_threshold=draw(st.sampled_from([1, 7, budget, 2 * budget]), "threshold"),
                page_aligned_scheduling=aligned,
                scheduling_policy=draw(st.sampled_from(["fcfs", "priority"]), "policy"),
                max_attention_work=draw(self.work_caps, "work"),
            ),
            CacheConfig(
                block_size=block_size,
                num_blocks=draw(self.pool_sizes, "num_blocks"),
                enable_prefix_caching=draw(st.sampled_from([True, True, False]), "caching"),
                model_fingerprint="fake",
            ),
            depth=draw(self.depths, "depth"),
        )
        config, cache = self.harness.config, self.harness.cache_config
        self.capacity = min(config.max_model_len, cache.num_tokens + 1)
        self.num_requests = 0

    def submit(self, prompt: list[int], max_tokens: int, **kwargs: object) -> None:  # type: ignore[override]
        # Derived from the request's arguments, so that the rules of the state machine need not pass options.
        digest = len(prompt) * 31 + max_tokens * 7 + self.num_requests
        options = RequestOptions(priority=digest % 3 - 1)
        kwargs["cache_salt"] = "other" if digest % 5 == 0 else ""
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        needs_rows = digest % 11 == 0
        kwargs["needs_token_on_host"] = digest % 4 == 0
        if len(prompt) + max_tokens <= self.capacity:
            self.harness.submit(request_id, prompt, max_tokens, options=options, needs_prompt_rows=needs_rows, **kwargs)
        else:
            with pytest.raises(ValueError):
                self.harness.submit(request_id, prompt, max_tokens)
        self.harness.scheduler.check_integrity()

    @rule(seed=st.integers(0, 2), other=st.integers(3, 5), data=st.data(), max_tokens=st.integers(1, 12))
    def arrive_with_a_shared_beginning(self, seed: int, other: int, data: st.DataObject, max_tokens: int) -> None:
        common = data.draw(st.integers(1, max(1, self.capacity - 1)), label="common")
        tail = data.draw(st.integers(0, max(0, min(40, self.capacity - common - 1))), label="tail")
        self.submit(make_prompt(seed, common) + make_prompt(other, tail), max_tokens)

    @precondition(lambda self: self.harness.tracked)
    @rule(data=st.data(), added=st.integers(1, 9))
    def second_turn(self, data: st.DataObject, added: int) -> None:
        """Submit a prompt that continues the tokens of another request."""
        tracked = self.harness.tracked[data.draw(st.sampled_from(sorted(self.harness.tracked)), label="turn")]
        prompt = tracked.request.token_ids + make_prompt(9, added)
        self.submit(prompt[: max(1, self.capacity - 1)], 1 + added % 4)


class LargeKnobsMachine(KnobsMachine):
    """State machine with prompts of up to 10,000 tokens."""

    pool_sizes = st.integers(300, 2000)
    token_budgets = st.sampled_from([61, 512, 2048])
    model_lens = st.just(10_000)
    work_caps = st.one_of(st.just(1 << 62), st.integers(100_000, 2_000_000))


MARKS_OF_SWEEPS = (pytest.mark.full, pytest.mark.timeout(7200))


@pytest.mark.parametrize(
    ("machine", "num_examples", "num_steps"),
    [
        (KnobsMachine, 16, 30),
        (LargeKnobsMachine, 8, 12),
        pytest.param(KnobsMachine, 500, 60, marks=MARKS_OF_SWEEPS),
        pytest.param(LargeKnobsMachine, 100, 20, marks=MARKS_OF_SWEEPS),
    ],
)
def test_random_settings_and_traffic(machine: type[SchedulerMachine], num_examples: int, num_steps: int) -> None:
    few_or_many = settings(_QUICK, max_examples=num_examples, stateful_step_count=num_steps)
    run_state_machine_as_test(machine, settings=few_or_many)
