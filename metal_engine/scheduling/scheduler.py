"""Who gets how many tokens in the next step.

There is no prefill phase and no decode phase: a step hands out tokens to running requests, oldest first, then
admits waiting ones, until the token budget is used up. A decode is a request whose share is one token; fresh
prefills, continuation chunks and decodes share every step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from metal_engine.config import CacheConfig, SchedulerConfig
from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.limits import num_new_tokens
from metal_engine.step import ModelOutput, NewRequestData, SchedulerOutput, TokenOutput

# Share of the pool left free when a request is admitted beside others, so that their next tokens do not
# preempt it at once.
WATERMARK = 0.01


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of the scheduler, for the log, ``/health`` and live views."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_blocks: int
    num_used_blocks: int
    peak_used_blocks: int


class Scheduler:
    """First come, first served, over one token budget and one pool of blocks.

    A request is admitted when blocks for all its tokens are free; it then grows block by block. When the pool
    runs out, the latest arrival is preempted: it loses its blocks, returns to the front of the waiting queue
    and is recomputed later. The oldest request therefore always advances, and nothing starves.
    """

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.config = config
        self.blocks = BlockManager(cache_config.num_blocks, cache_config.block_size)
        self.requests: dict[str, Request] = {}
        # Both in order of arrival; a preempted request goes back to the front of `waiting`.
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._watermark_blocks = int(WATERMARK * cache_config.num_blocks)
        # What the runner holds, and what it must forget before the next step.
        self._held_by_runner: set[str] = set()
        self._dropped: list[str] = []

    # --- requests come and go -------------------------------------------------------------------------------

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError if a request of this size could never be served."""
        if num_prompt_tokens < 1:
            raise ValueError("the prompt has no tokens")
        total = num_prompt_tokens + max_tokens
        if total > self.config.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: {total} tokens "
                f"together, but the maximum context length is {self.config.max_model_len} tokens"
            )
        # The KV of the last token generated is never needed.
        num_blocks = self.blocks.blocks_for(total - 1)
        if num_blocks > self.blocks.num_blocks:
            raise ValueError(
                f"the request needs {num_blocks} KV cache blocks ({num_prompt_tokens} prompt tokens, "
                f"max_tokens {max_tokens}), but the pool has only {self.blocks.num_blocks}"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never be served or its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.check_fits(request.num_prompt_tokens, request.max_tokens)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = request

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a request in any state and free its blocks; unknown ids (finished already) are ignored."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        request.status = status
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)
        self._release(request_id)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preemptions=self.num_preemptions,
            num_blocks=self.blocks.num_blocks,
            num_used_blocks=self.blocks.num_used_blocks,
            peak_used_blocks=self.blocks.peak_used_blocks,
        )

    # --- a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan one step. May be called again before :meth:`update` for the step before.

        The plan is empty when all that is left to do waits for steps under way; it need not be executed.
        """
        plan = SchedulerOutput(step_id=self._num_steps)
        self._num_steps += 1
        num_preemptions = self.num_preemptions
        token_budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if self.num_preemptions == num_preemptions:  # else the pool is full: admitting would preempt again
            self._schedule_waiting(plan, token_budget)
        if plan.num_scheduled_tokens:  # an empty plan is not executed, so it must not carry the drops off
            plan.dropped_req_ids, self._dropped = self._dropped, []
        return plan

    def _schedule_running(self, plan: SchedulerOutput, token_budget: int) -> int:
        """Give running requests their share, oldest first; returns what is left of the budget."""
        for request in list(self.running.values()):
            if token_budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one, earlier in this loop
            share = num_new_tokens(request, token_budget, self.config)
            if share == 0:
                continue
            new_block_ids = self._allocate_or_preempt(request, request.num_computed_tokens + share)
            if new_block_ids is None:
                break  # the request was the latest arrival and preempted itself
            if new_block_ids:
                plan.new_block_ids[request.request_id] = new_block_ids
            self._add_to_plan(plan, request, share)
            token_budget -= share
        return token_budget

    def _schedule_waiting(self, plan: SchedulerOutput, token_budget: int) -> None:
        """Admit waiting requests in order while the budget, the pool and ``max_num_seqs`` allow."""
        while self.waiting and token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = next(iter(self.waiting.values()))
            if request.num_output_placeholders:
                break  # preempted while a step was under way: its token must land first
            share = num_new_tokens(request, token_budget, self.config)
            reserve = self._watermark_blocks if self.running else 0
            if self.blocks.allocate(request.request_id, request.num_tokens, reserve=reserve) is None:
                break
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            request.status = RequestStatus.RUNNING
            self._held_by_runner.add(request.request_id)
            plan.new_requests.append(
                NewRequestData(
                    request_id=request.request_id,
                    token_ids=list(request.token_ids),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=request.num_computed_tokens,
                    block_ids=self.blocks.block_ids(request.request_id),
                    sampling_params=request.sampling_params,
                )
            )
            self._add_to_plan(plan, request, share)
            token_budget -= share

    def _add_to_plan(self, plan: SchedulerOutput, request: Request, share: int) -> None:
        plan.num_scheduled_tokens[request.request_id] = share
        request.num_computed_tokens += share
        if request.num_computed_tokens == request.num_tokens_with_placeholders:
            plan.sampled_req_ids.append(request.request_id)
            request.num_output_placeholders += 1

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for ``num_tokens`` tokens, preempting the latest arrivals for them if need be.

        Returns None if ``request`` itself was the latest.
        """
        while True:
            new_block_ids = self.blocks.allocate(request.request_id, num_tokens)
            if new_block_ids is not None:
                return new_block_ids
            latest = next(reversed(self.running.values()))
            self._preempt(latest)
            if latest is request:
                return None

    def _preempt(self, request: Request) -> None:
        del self.running[request.request_id]
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._release(request.request_id)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _release(self, request_id: str) -> None:
        self.blocks.free(request_id)
        if request_id in self._held_by_runner:
            self._held_by_runner.remove(request_id)
            self._dropped.append(request_id)

    def update(self, plan: SchedulerOutput, model_output: ModelOutput) -> list[TokenOutput]:
        """Take in what a step sampled; finish the requests that are done and free their blocks."""
        outputs = []
        for request_id, token_id in zip(plan.sampled_req_ids, model_output.sampled_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted, or stopped, while the step was under way
            request.num_output_placeholders -= 1
            request.token_ids.append(token_id)
            status = _finish_status(request, token_id)
            output = TokenOutput(request_id, [token_id])
            if status is not None:
                output.finish_reason = status.finish_reason
                if status is RequestStatus.FINISHED_STOPPED and token_id not in request.eos_token_ids:
                    output.stop_reason = token_id
                self.finish_request(request_id, status)
            outputs.append(output)
        return outputs

    # --- tests and debugging --------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert every invariant between steps; for tests and debugging."""
        self.blocks.check_integrity()
        assert not self.waiting.keys() & self.running.keys()
        assert self.waiting.keys() | self.running.keys() == self.requests.keys()
        assert len(self.running) <= self.config.max_num_seqs
        for queue in (self.waiting, self.running):
            arrivals = [request.arrival for request in queue.values()]
            assert arrivals == sorted(arrivals), f"out of order of arrival: {arrivals}"
        num_held = {request_id: len(self.blocks.block_ids(request_id)) for request_id in self.requests}
        for request in self.waiting.values():
            assert request.num_computed_tokens == 0
        held = {request_id for request_id, num_blocks in num_held.items() if num_blocks}
        assert self.blocks.num_used_blocks == sum(num_held.values())
        assert held == self.running.keys() == self._held_by_runner
        for request_id, request in self.running.items():
            assert num_held[request_id] >= self.blocks.blocks_for(request.num_computed_tokens)
            assert 0 < request.num_computed_tokens <= request.num_tokens_with_placeholders


def _finish_status(request: Request, token_id: int) -> RequestStatus | None:
    if token_id in request.stop_token_id_set:
        return RequestStatus.FINISHED_STOPPED
    if request.num_output_tokens >= request.max_tokens:
        return RequestStatus.FINISHED_LENGTH
    return None
