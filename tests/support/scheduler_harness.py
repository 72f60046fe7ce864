"""Real scheduler on :class:`FakeKVRunner`: every step's plan and every token are checked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import PromptImages
from metal_engine.request import MAX_FAILURES, Request, RequestOptions, RequestOutput, RequestStatus
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.token_allotment import check_fits
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import UNKNOWN_DRAFT, Drafting, SchedulerOutput
from metal_engine.token_rules import NO_RULES, TokenRules
from tests.support.fake_kv_runner import VOCAB_SIZE, FakeKVRunner, FakeStep, expected_tokens, seen_prompt
from tests.support.fake_kv_transfer import FakeTransfer
from tests.support.scheduling_checks import (
    check_drafts,
    check_fcfs,
    check_plan,
    demand_of,
    is_plain,
    max_steps,
    was_passed_over,
    without_drafts,
)
from tests.support.speculation import Drafter, FreeDrafts, KnownAheadTimes, KnownTimes, speculate


class HostSampled(SamplingParams):
    """Parameters of a request whose next token can be sampled only after the previous token is known on the host."""

    needs_token_on_host = True  # type: ignore[assignment]


class _AnyText:
    """Placeholder for a grammar."""

    begins_free = False

    def matcher(self) -> Any:
        raise NotImplementedError


_GRAMMAR = TokenRules(grammar=_AnyText())


@dataclass
class Tracked:
    """Request under test with its expected and actual output."""

    request: Request
    expected: list[int]
    expected_reason: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None


class SomeRightDrafts(Drafter):
    """Drafter that proposes the right tokens up to a random position and wrong tokens after it."""

    def __init__(self, tracked: Mapping[str, Tracked], seed: int) -> None:
        super().__init__()
        self._tracked = tracked
        self._random = random.Random(seed)
        self.known: set[str] = set()  # requests with stored state
        self.num_right = self.num_wrong = 0

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        self.known.add(request.request_id)
        return self.drafts(request, num_tokens)

    def drafts(self, request: Request, num_tokens: int) -> list[int]:
        assert num_tokens > 0
        right = self._tracked[request.request_id].expected[request.num_output_tokens :]
        right = right[: self._random.randint(0, num_tokens)]
        num_wrong = self._random.randint(0, num_tokens - len(right))
        self.num_right += len(right)
        self.num_wrong += num_wrong
        return right + [self._random.randrange(VOCAB_SIZE) for _ in range(num_wrong)]

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)


class SomeRightDraftModel:
    """Draft model that returns right tokens up to a random position.

    Sometimes returns fewer drafts than planned, or none.
    """

    def __init__(self, tracked: Mapping[str, Tracked], seed: int) -> None:
        super().__init__()
        self._tracked = tracked
        self._drafts = SomeRightDrafts(tracked, seed)
        self._random = random.Random(seed)

    def draft(self, plan: SchedulerOutput) -> Drafting:
        drafts_of, follows = plan.scheduled_spec_decode_tokens, plan.draft_model_req_ids
        assert not drafts_of.keys() & set(follows) and plan.num_scheduled_tokens.keys() >= set(follows)
        assert len(set(follows)) == len(follows)
        drafting = Drafting()
        for request_id, planned in drafts_of.items():
            assert planned == [UNKNOWN_DRAFT] * len(planned), "a draft model has nothing to go by but tokens"
            request = self._tracked[request_id].request
            drafts = self._drafts.drafts(request, self._random.randint(1, len(planned)))
            ends = [i for i, token_id in enumerate(drafts) if token_id in request.stop_token_id_set]
            drafting.token_ids[request_id] = drafts[: min(ends, default=len(drafts))]
        return drafting


class SchedulerHarness:
    """Real scheduler on the fake runner, with checks of every invariant at every step and of every token.

    Args:
        depth: maximum number of steps in flight. 1 is the plain loop, 2 schedules step k+1 before the update for step
            k.
        transfer: KV transfer that loads and saves blocks; None for an engine without a KV store.
        drafts: random seed of drafts, some of them right; None for an engine without speculation.
        has_draft_model: True if a draft model makes the drafts, as ``config.speculative`` specifies.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        depth: int = 1,
        transfer: FakeTransfer | None = None,
        drafts: int | None = None,
        has_draft_model: bool = False,
    ) -> None:
        self.config = config
        self.cache_config = cache_config
        self.depth = depth
        self.transfer = transfer
        self.tracked: dict[str, Tracked] = {}
        is_known = drafts is not None and not has_draft_model
        self.proposer = SomeRightDrafts(self.tracked, drafts) if is_known and drafts is not None else None
        self.scheduler = Scheduler(config, cache_config, transfer.connector() if transfer else None)
        save = transfer.store.__setitem__ if transfer else None
        self.runner = FakeKVRunner(cache_config, config.max_num_seqs, save)
        if drafts is not None:
            times = KnownTimes(row_seconds=(0.0, 0.02, 0.2)[drafts % 3])
            proposer = self.proposer or make_proposer(config.speculative)
            costs = FreeDrafts(may_probe=drafts % 2 == 0) if has_draft_model else None
            ahead = KnownAheadTimes((0.3, 0.6, 2.0)[drafts // 3 % 3])
            speculate(self.scheduler, proposer, times, costs, async_planning=ahead)
            if has_draft_model:
                self.runner.make_drafts = SomeRightDraftModel(self.tracked, drafts).draft
        self._live: dict[str, None] = {}
        self.in_flight: deque[tuple[SchedulerOutput, FakeStep]] = deque()
        self.plans: list[SchedulerOutput] = []
        # True if later requests may have overtaken waiting suspects. Reset when all requests have ended.
        self._was_overtaken = False
        self._has_images = False  # features may make a request wait, so its allotments are not foreseen
        self._steps_passed_over = 0  # consecutive steps in which a request was passed over

    # --- requests -------------------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        stop_after: int | None = None,
        ignore_eos: bool = False,
        options: RequestOptions | None = None,
        cache_salt: str = "",
        needs_prompt_rows: bool = False,
        needs_token_on_host: bool = False,
        pooling_type: str | None = None,
        images: PromptImages | None = None,
    ) -> Request:
        """Queue a request. ``stop_after=n`` turns the n-th generated token into an end of sequence.

        A request with a ``pooling_type`` ends with its prompt. Its result is the token that would be sampled there.
        """
        if pooling_type is not None:
            max_tokens, stop_after, needs_token_on_host = 1, None, False
        make_params = HostSampled if needs_token_on_host else SamplingParams
        self._has_images |= images is not None
        expected = expected_tokens(seen_prompt(prompt, images), max_tokens)
        eos: frozenset[int] = frozenset()
        reason = "length"
        if stop_after is not None and stop_after <= max_tokens:
            eos = frozenset({expected[stop_after - 1]})
            if not ignore_eos:
                # Not `stop_after`: the token can occur earlier.
                expected = expected[: expected.index(expected[stop_after - 1]) + 1]
                reason = "stop"
        request = Request(
            request_id,
            prompt,
            make_params(max_tokens=max_tokens, ignore_eos=ignore_eos),
            max_tokens=max_tokens,
            rules=_GRAMMAR if needs_token_on_host else NO_RULES,
            eos_token_ids=eos,
            options=options or RequestOptions(),
            cache_salt=cache_salt,
            needs_prompt_rows=needs_prompt_rows,
            pooling_params=None if pooling_type is None else PoolingParams(pooling_type=pooling_type),
            images=images,
        )
        if pooling_type is not None:
            reason = "stop"
        # The engine makes this check before it queues a request.
        num_tokens = 0 if pooling_type is not None else request.max_tokens
        check_fits(request.num_prompt_tokens, num_tokens, self.config, self.cache_config)
        self.scheduler.add_request(request)
        self.tracked[request_id] = Tracked(request, expected, reason)
        self._was_overtaken &= bool(self._live)
        self._live[request_id] = None
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ABORTED)
        tracked = self.tracked[request_id]
        if tracked.is_live:
            tracked.finish_reason = "abort"
            del self._live[request_id]
        assert not self.scheduler.blocks.block_ids(request_id)
        self.scheduler.check_integrity()

    def fail_oldest(self, *, cache_is_lost: bool = False) -> None:
        """Fail the oldest step in flight and cancel the steps after it."""
        plan, _ = self.in_flight.popleft()
        self._fail(plan)
        for void, _ in self.in_flight:
            self.scheduler.cancel(void)
        self.in_flight.clear()
        if cache_is_lost:
            self.scheduler.preempt_all()
        self.scheduler.check_integrity()

    def refuse_newest(self) -> None:
        """Refuse the step planned last, as the runner can do. Earlier steps are finished."""
        plan, _ = self.in_flight.pop()
        while self.in_flight:
            self.update()
        self._fail(plan)
        self.scheduler.check_integrity()

    def _fail(self, plan: SchedulerOutput) -> None:
        """Cancel a failed plan. End the requests with ``MAX_FAILURES`` failures, as the engine does."""
        self.scheduler.cancel(plan)
        for request_id in plan.num_scheduled_tokens:
            request = self.scheduler.requests.get(request_id)
            if request is None:
                continue
            request.num_failures += 1
            self._was_overtaken |= request.is_suspect
            if request.num_failures == MAX_FAILURES:
                self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ERROR)
                del self._live[request_id]
                self.tracked[request_id].finish_reason = "error"

    @property
    def live(self) -> list[Tracked]:
        """Unfinished requests in order of arrival."""
        return [self.tracked[request_id] for request_id in self._live]

    # --- steps ----------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan and start a step, without the update."""
        assert len(self.in_flight) < self.depth
        before = {t.request.request_id: demand_of(t.request) for t in self.live}
        context_lens = {request_id: r.num_computed_tokens for request_id, r in self.scheduler.running.items()}
        again = {request_id for request_id, r in self.scheduler.running.items() if self.scheduler.states.is_rejected(r)}
        num_preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_limits(plan)
        num_preemptions = self.scheduler.num_preemptions - num_preemptions
        # The scheduler can delay a step until all tokens are known, to add drafts to it.
        if not self._has_images and (plan.num_scheduled_tokens or not self.in_flight or not self.config.speculative):
            self._check_plan(plan, before, context_lens, again, num_preemptions)
        is_idle = not plan.num_scheduled_tokens and not self.in_flight and not num_preemptions
        if is_idle and not self.scheduler.admissions.loading:
            assert not self.live, "nothing is under way, and nothing is planned"
        self.plans.append(plan)
        if plan.num_scheduled_tokens:
            self.in_flight.append((plan, self.runner.execute(plan)))
        else:
            assert not (plan.dropped_req_ids or plan.new_requests or plan.new_block_ids), "lost on the runner"
        return plan

    def _check_plan(
        self,
        plan: SchedulerOutput,
        demand: dict[str, int],
        context_lens: dict[str, int],
        again: set[str],
        num_preemptions: int,
    ) -> None:
        check_drafts(self.scheduler, plan, demand, context_lens)
        # Drafts do not change the allotments of other tokens.
        undrafted = without_drafts(plan)
        check_plan(self.scheduler, undrafted, demand, context_lens, again)
        if self._was_overtaken:
            return
        passed_over = not num_preemptions and was_passed_over(self.scheduler, undrafted, demand, context_lens, again)
        self._steps_passed_over = self._steps_passed_over + 1 if passed_over else 0
        assert self._steps_passed_over <= self.config.max_num_partial_prefills, "a free slot stays free"
        if is_plain(self.config, self.cache_config) and not self.cache_config.num_state_slots:
            check_fcfs(self.scheduler, undrafted, demand, context_lens, num_preemptions, self.depth)

    def update(self) -> list[RequestOutput]:
        """Process the output of the oldest step in flight."""
        plan, handle = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, handle.result())
        for output in outputs:
            self._check_output(output)
        self.scheduler.check_integrity()
        return outputs

    def step(self) -> SchedulerOutput:
        """Run one iteration of the loop: start a step, then process the oldest if ``depth`` steps are in flight."""
        plan = self.schedule()
        if len(self.in_flight) == self.depth or (self.in_flight and not plan.num_scheduled_tokens):
            self.update()
        return plan

    def run(self, until: Callable[[], bool] | None = None) -> int:
        """Step until all requests are done, within a bound. Return the number of steps.

        The first request in order advances in every step, except while it waits for a step in flight or for its place
        in the rotation. The bound is therefore the sum of the steps of each request alone. With images, it is twice the
        sum.
        """
        # Chunks are cut at state checkpoints: twice in a prompt, and at intervals.
        num_cuts = 3 if self.cache_config.num_state_slots else 0
        interval = self.scheduler.states.interval
        alone = sum(
            max_steps(t.request.num_tokens, self.config, self.cache_config.block_size)
            + (num_cuts and num_cuts + t.request.num_tokens // interval)
            + len(t.expected)
            - len(t.token_ids)
            for t in self.live
        )
        # After a late mask, a request with recurrent states may compute all its rows again, one in each step.
        longest = max((t.request.num_tokens for t in self.live), default=0) if self.cache_config.num_state_slots else 0
        num_again = self.runner.num_late * (1 + longest)
        bound = (alone + num_again) * self.depth + self.depth + 4
        if any(t.request.images is not None for t in self.live):
            bound *= 2  # the first request may wait for the features of a request that is then preempted
        # Decodes are planned before a prompt that waits for features, and before all prompts if the budget is small. If
        # blocks run out later, these decodes are preempted and compute their tokens again. A tenfold bound then only
        # detects endless runs.
        is_small = (
            self.config.max_num_partial_prefills > 1 and self.config.max_num_batched_tokens < self.config.max_num_seqs
        )
        if self._has_images or is_small:
            bound *= 10
        steps = num_waits = 0
        while self.live and not (until is not None and until()):
            if not self.step().num_scheduled_tokens and self.scheduler.admissions.loading:
                num_waits += 1  # waits for KV
                assert num_waits <= 1000
                continue
            steps += 1
            assert steps <= bound, f"{len(self.live)} requests unfinished after {steps} steps"
        return steps

    def drain(self) -> None:
        """Run until all requests are done, then check that runner and scheduler are empty."""
        if self.transfer is not None:
            self.transfer.answer_at_once()
        self.run()
        while self.in_flight:
            self.update()
        assert not self.scheduler.has_requests
        if self.transfer is not None:
            assert not self.transfer.tickets, "loads leaked"
            assert not self.transfer.held, "host memory leaked"
        assert self.scheduler.blocks.num_used_blocks == 0, "blocks leaked"
        assert self.proposer is None or not self.proposer.known, "what drafts are made of leaked"
        for tracked in self.tracked.values():
            if tracked.finish_reason not in ("abort", "error"):
                assert tracked.token_ids == tracked.expected
                assert tracked.finish_reason == tracked.expected_reason
        # The next step carries the drops of the last step.
        self.submit("sentinel", [1], 1)
        self.run()
        assert self.runner.held.keys() == {"sentinel"}, "the runner was not told to drop"

    # --- checks ---------------------------------------------------------------------------------------------

    def _check_output(self, output: RequestOutput) -> None:
        tracked = self.tracked[output.request_id]
        assert tracked.is_live, f"{output.request_id} has finished, and got {output}"
        is_pooled = tracked.request.pooling_params is not None
        assert (output.pooled is not None) == is_pooled == (not output.token_ids)
        new = output.token_ids if output.pooled is None else output.pooled.tolist()
        tracked.token_ids += new
        n = len(tracked.token_ids)
        assert new == tracked.expected[n - len(new) : n], f"{output.request_id}: wrong token {n} of {tracked.expected}"
        assert output.finish_reason == (tracked.expected_reason if n == len(tracked.expected) else None)
        tracked.finish_reason = output.finish_reason
        if not tracked.is_live:
            del self._live[output.request_id]

    def check_limits(self, plan: SchedulerOutput) -> None:
        """Check that the step exceeds no limit."""
        assert sum(plan.num_scheduled_tokens.values()) <= self.config.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= len(self.scheduler.running) <= self.config.max_num_seqs
        for request_id in plan.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            assert request.num_computed_tokens <= self.config.max_model_len
            assert request.num_output_tokens + request.num_output_placeholders <= request.max_tokens
