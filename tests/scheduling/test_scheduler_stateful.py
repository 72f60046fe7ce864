"""Runs the scheduler under random traffic. Checks all invariants at every step, and that batching changes no token.

The harness (``tests/support/fake_kv_runner.py``) makes the checks; this file generates the traffic.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from metal_engine.pooling_params import POOLING_TYPES
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import SchedulerOutput
from tests.support.fake_kv_runner import FakeKVRunner, FakeStep, make_prompt
from tests.support.scheduler_harness import SchedulerHarness
from tests.support.speculation import draft_model_config, speculative_config


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive and abort between steps and during a step.

    One step runs at a time, or steps are planned before the tokens of the steps in flight are known.
    """

    depths = st.integers(1, 3)
    is_recurrent = False
    is_speculative = False

    @initialize(
        data=st.data(),
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        num_blocks=st.integers(1, 40),
        max_num_batched_tokens=st.one_of(st.integers(1, 8), st.integers(1, 64), st.just(512)),
        max_num_seqs=st.integers(1, 8),
        max_model_len=st.one_of(st.integers(2, 400), st.just(400)),
    )
    def start_engine(
        self,
        data: st.DataObject,
        block_size: int,
        num_blocks: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        num_state_slots = 0
        if self.is_recurrent:
            num_state_slots = data.draw(st.integers(max_num_seqs, 4 * max_num_seqs), label="num_state_slots")
        speculative, caches, drafts = None, self.is_recurrent, None
        has_draft_model = False
        if self.is_speculative:
            has_draft_model = data.draw(st.booleans(), label="has_draft_model")
            make_config = draft_model_config if has_draft_model else speculative_config
            speculative = make_config(data.draw(st.integers(1, 6), label="num_speculative_tokens"))
            caches = data.draw(st.booleans(), label="enable_prefix_caching")
            drafts = data.draw(st.integers(0, 1 << 16), label="drafts")
        depth = data.draw(self.depths, label="depth")
        self.harness = SchedulerHarness(
            SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
                speculative=speculative, async_scheduling=depth > 1,
            ),
            CacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                enable_prefix_caching=caches,
                num_state_slots=num_state_slots,
            ),
            depth=depth,
            drafts=drafts,
            has_draft_model=has_draft_model,
        )  # fmt: skip
        if self.is_recurrent:
            self.harness.scheduler.states.interval = block_size * data.draw(st.integers(1, 8), label="interval")
        # The KV of the last generated token is never written.
        self.capacity = min(max_model_len, block_size * num_blocks + 1)
        self.num_requests = 0

    @rule(
        data=st.data(),
        seed=st.integers(0, 5),
        max_tokens=st.one_of(st.integers(1, 4), st.integers(1, 50)),
        fill=st.booleans(),
        ignore_eos=st.booleans(),
    )
    def arrive(self, data: st.DataObject, seed: int, max_tokens: int, fill: bool, ignore_eos: bool) -> None:
        lengths = st.one_of(st.integers(1, 8), st.integers(1, self.capacity + 1))
        prompt = make_prompt(seed, data.draw(lengths, label="prompt length"))
        if fill and len(prompt) < self.capacity < len(prompt) + max_tokens:
            max_tokens = self.capacity - len(prompt)  # exactly what fits
        stop_after = data.draw(st.none() | st.integers(1, max_tokens), label="stop_after")
        self.submit(prompt, max_tokens, stop_after=stop_after, ignore_eos=ignore_eos)

    @rule(data=st.data(), seed=st.integers(0, 5), pooling_type=st.sampled_from(POOLING_TYPES))
    def arrive_to_be_pooled(self, data: st.DataObject, seed: int, pooling_type: str) -> None:
        """Submit a pooling request, which ends with its prompt and may need the whole pool."""
        config, cache_config = self.harness.config, self.harness.cache_config
        most = min(config.max_model_len, cache_config.num_tokens)
        length = data.draw(st.integers(1, min(8, most)) | st.integers(1, most), label="prompt length")
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        self.harness.submit(request_id, make_prompt(seed, length), 1, pooling_type=pooling_type)
        self.harness.scheduler.check_integrity()

    @rule(data=st.data(), num_requests=st.integers(2, 6))
    def arrive_together(self, data: st.DataObject, num_requests: int) -> None:
        """Submit requests that fit into the pool together at first, and then outgrow it."""
        most = max(1, self.capacity // num_requests)
        for seed in range(num_requests):
            length = data.draw(st.integers(max(1, most // 2), most), label="prompt length")
            self.submit(make_prompt(seed, length), max(1, min(60, self.capacity - length)))

    def submit(
        self, prompt: list[int], max_tokens: int, *, stop_after: int | None = None, ignore_eos: bool = False
    ) -> None:
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        if len(prompt) + max_tokens <= self.capacity:
            self.harness.submit(
                request_id,
                prompt,
                max_tokens,
                stop_after=stop_after,
                ignore_eos=ignore_eos,
                needs_token_on_host=self.num_requests % 4 == 0,
            )
        else:
            with pytest.raises(ValueError):
                self.harness.submit(request_id, prompt, max_tokens)
            assert request_id not in self.harness.scheduler.requests
        self.harness.scheduler.check_integrity()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from([t.request.request_id for t in self.harness.live])))

    @precondition(lambda self: len(self.harness.in_flight) < self.harness.depth)
    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def update(self) -> None:
        self.harness.update()

    @precondition(lambda self: self.harness.in_flight)
    @rule(cache_is_lost=st.booleans())
    def fail_a_step(self, cache_is_lost: bool) -> None:
        self.harness.fail_oldest(cache_is_lost=cache_is_lost)

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def refuse_a_step(self) -> None:
        self.harness.refuse_newest()

    @rule(num_late=st.integers(1, 5))
    def hold_up_masks(self, num_late: int) -> None:
        self.harness.runner.num_late = num_late

    @precondition(lambda self: self.harness.live)
    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.harness.in_flight) >= self.harness.depth:
                self.harness.update()
            self.harness.step()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        while len(self.harness.in_flight) >= self.harness.depth:
            self.harness.update()
        self.harness.drain()


class RecurrentSchedulerMachine(SchedulerMachine):
    """The model has recurrent states, and some become state checkpoints of cached prefixes."""

    is_recurrent = True


class SpeculativeSchedulerMachine(SchedulerMachine):
    """Requests have drafts, of which some are accepted. Some prompts continue the output of other requests."""

    is_speculative = True

    @precondition(lambda self: self.harness.tracked)
    @rule(data=st.data(), max_tokens=st.integers(1, 20))
    def arrive_with_what_another_has_generated(self, data: st.DataObject, max_tokens: int) -> None:
        before = data.draw(st.sampled_from(list(self.harness.tracked.values())), label="before")
        prompt = before.request.token_ids[: before.request.num_prompt_tokens] + before.token_ids
        prompt = prompt[: data.draw(st.integers(1, len(prompt)), label="prompt length")]
        self.submit(prompt, max_tokens)


class RecurrentSpeculativeSchedulerMachine(SpeculativeSchedulerMachine):
    """Requests have drafts and recurrent states, which are rolled back if a draft is rejected."""

    is_recurrent = True


# The health checks measure generation against execution; here execution is the point.
_QUICK = settings(max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
_FULL = settings(_QUICK, max_examples=400, stateful_step_count=80)


MACHINES = (
    SchedulerMachine,
    RecurrentSchedulerMachine,
    SpeculativeSchedulerMachine,
    RecurrentSpeculativeSchedulerMachine,
)


@pytest.mark.parametrize("machine", MACHINES)
def test_random_traffic(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=_QUICK)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_much_random_traffic(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=_FULL)


# --- the machine itself must notice -------------------------------------------------------------------------


def _run_workload(
    corrupt: Callable[[SchedulerOutput], bool] | None, depth: int, num_slots: int = 0
) -> SchedulerHarness:
    """Run chunked prefills, decodes and preemptions in a pool that is too small. ``corrupt`` spoils a plan.

    ``corrupt`` is called for each plan until it returns True, which means that it has changed the plan.
    """
    harness = SchedulerHarness(
        SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=3, max_model_len=100),
        CacheConfig(block_size=4, num_blocks=14, enable_prefix_caching=num_slots > 0, num_state_slots=num_slots),
        depth=depth,
    )

    class Corrupting(FakeKVRunner):
        done = False

        def execute(self, plan: SchedulerOutput) -> FakeStep:
            if corrupt is not None and not self.done:
                self.done = corrupt(plan)
            return super().execute(plan)

    harness.runner = Corrupting(harness.cache_config, harness.config.max_num_seqs)
    for i, (length, max_tokens) in enumerate([(13, 20), (9, 24), (17, 12), (5, 30), (26, 8)]):
        harness.submit(f"r{i}", make_prompt(i, length), max_tokens)
    harness.submit("again", make_prompt(2, 17), 8)
    harness.drain()
    assert harness.scheduler.num_preemptions > 0
    assert corrupt is None or harness.runner.done, "nothing was corrupted"
    return harness


def _wrong_block(plan: SchedulerOutput) -> bool:
    for new in plan.new_requests:
        if plan.num_scheduled_tokens[new.request_id] < len(new.token_ids):
            continue
        if len(new.block_ids) > 1:
            # The plan is consistent within this step. The error shows when another request gets the block that was
            # replaced.
            new.block_ids[0] = (new.block_ids[0] + 1) % 14
            return True
    return False


def _lose_a_drop(plan: SchedulerOutput) -> bool:
    return bool(plan.dropped_req_ids) and plan.dropped_req_ids.pop() is not None


def _lost_token_on_resumption(plan: SchedulerOutput) -> bool:
    for new in plan.new_requests:
        if len(new.token_ids) > new.num_prompt_tokens:
            new.token_ids.pop()
            return True
    return False


def _wrong_state(plan: SchedulerOutput) -> bool:
    for new in plan.new_requests:
        read, write = new.state_slots
        if read:
            new.state_slots = (read % 12 + 1, write)
            return True
    return False


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_workload_is_right_uncorrupted(depth: int) -> None:
    _run_workload(None, depth)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("corrupt", [_wrong_block, _lose_a_drop, _lost_token_on_resumption, _wrong_state])
def test_harness_notices(corrupt: Callable[[SchedulerOutput], bool], depth: int) -> None:
    with pytest.raises(AssertionError) as caught:
        _run_workload(corrupt, depth, num_slots=12 if corrupt is _wrong_state else 0)
    assert "nothing was corrupted" not in str(caught.value)


def test_a_pooling_request_of_a_void_step_is_pooled_in_a_later_step() -> None:
    harness = SchedulerHarness(
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=100),
        CacheConfig(block_size=4, num_blocks=40),
        depth=2,
    )
    harness.submit("chat", make_prompt(0, 6), 8)
    harness.schedule()
    harness.submit("pooled", make_prompt(1, 9), 1, pooling_type="MEAN")
    assert harness.schedule().pooled_req_ids == ["pooled"]
    harness.fail_oldest()
    harness.drain()
    assert harness.tracked["pooled"].finish_reason == "stop"
