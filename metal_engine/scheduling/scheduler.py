"""Scheduler: decides how many tokens each request gets in the next step.

There are no separate prefill and decode phases. A step allots tokens until its budget is used up: first to requests
with one token left to compute, then to running and waiting requests with more tokens. New prefills, continued chunks
and decodes share every step. docs/tuning.md explains the rules. ``token_allotment.py`` limits a request's token
allotment, and ``admission.py`` selects the next request to admit.
"""

from __future__ import annotations

from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import Request, RequestOutput, RequestStatus
from metal_engine.scheduling.admission import Admissions, Candidate
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.image_planner import ImagePlanner
from metal_engine.scheduling.integrity import check_integrity
from metal_engine.scheduling.prefix_cache import PrefixCache
from metal_engine.scheduling.recurrent_states import RecurrentStates
from metal_engine.scheduling.speculation.proposals import Proposer
from metal_engine.scheduling.speculation.speculation import Speculation
from metal_engine.scheduling.state_slots import StateSlots
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.scheduling.token_allotment import (
    MAX_PROMPT_ROWS,
    PrefillAllocator,
    StepBudget,
    chunk_unit,
    num_remaining,
)
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import ModelOutput, NewRequestData, SchedulerOutput

# Fraction of the block pool that must remain free when a request is admitted beside running requests. Without it, the
# next tokens of the running requests would preempt the new request at once.
WATERMARK = 0.01


class Scheduler:
    """Serves requests in order of priority and arrival, within one token budget and one block pool.

    A request is admitted when there are enough free blocks for all its tokens. It then allocates block by block. When
    the pool is exhausted, the last running request in order is preempted: it loses its blocks, returns to its position
    in the waiting queue, and is recomputed later. The first request in order therefore always makes progress.

    With a connector, a request whose prompt may have KV in a store first waits in state WAITING_FOR_REMOTE_KVS. Once
    the KV is in host memory, the request joins the queue at its position. It holds no blocks before admission.

    With a proposer, which requires ``config.speculative``, drafts use the remaining budget of a step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        connector: KVConnectorScheduler | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.config = config
        self.blocks = BlockManager(cache_config.num_blocks, cache_config.block_size)
        self.connector = connector
        slots = StateSlots(cache_config.num_state_slots)
        self.states = RecurrentStates(slots, cache_config, config.max_num_seqs, connector)
        self.images = ImagePlanner(config, chunk_unit(config, cache_config.block_size))
        on_publish = None if connector is None else self._save_to_store
        self.prefix_cache = PrefixCache(self.blocks, cache_config, slots, on_publish)
        self.requests: dict[str, Request] = {}
        self.admissions = Admissions(config, self.prefix_cache, cache_config.block_size, self.states, connector)
        self.running: dict[str, Request] = {}  # in order of priority and arrival
        self.speculation = None if proposer is None else Speculation(config, self.blocks, proposer, states=self.states)
        self.num_preemptions = 0
        self._num_arrivals = 0
        self.num_plans = 0
        self._last_admission = -1  # id of the last step that admitted a request
        self._watermark_blocks = int(WATERMARK * cache_config.num_blocks)
        # Requests that the runner holds, and requests that it must drop before the next step.
        self.held_by_runner: set[str] = set()
        self._dropped: list[str] = []
        # Running requests with full blocks that are not in the prefix cache yet. Always empty if nothing is cached.
        self._filled: list[Request] = []
        self._publishes = self.prefix_cache.is_enabled or self.states.is_used

    # --- adding and ending requests -------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request, or start loading its KV. Raises ValueError if its id is in use.

        The request must pass :func:`metal_engine.scheduling.token_allotment.check_fits`, which is not called here.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        priority = request.options.priority if self.config.scheduling_policy == "priority" else 0
        request.sort_key = (priority, request.arrival)
        self.requests[request.request_id] = request
        self.admissions.add(request)

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a request in any state and free its blocks. Unknown ids are ignored: they have finished already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        request.status = status
        self.admissions.remove(request_id)
        self.running.pop(request_id, None)
        self._release(request)
        if self.speculation is not None:
            self.speculation.forget(request_id)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats.of(self)

    # --- a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan one step. With ``--async-scheduling``, called before :meth:`update` for the previous step.

        The planned tokens count as computed from now on. A plan that fails or will not run must therefore be cancelled
        (:meth:`cancel`). The plan is empty if all remaining work waits for steps in flight or for loads from a store.
        An empty plan is not executed.
        """
        plan = SchedulerOutput(step_id=self.num_plans)
        self.num_plans += 1
        self.states.begin_step()
        self.images.begin_step()
        self.admissions.enqueue_loaded()
        if self.speculation is not None and self.speculation.should_wait_for_tokens(
            self.running, bool(self.admissions.waiting)
        ):
            return plan
        prompt_rows = max(MAX_PROMPT_ROWS, self.blocks.block_size)
        budget = StepBudget(self.config.max_num_batched_tokens, self.config.max_attention_work, prompt_rows)
        num_preemptions = self.num_preemptions
        partial = self._schedule_decodes(plan, budget)
        chunk_limits = self._max_chunk_tokens, self._plan_whole_prompt
        prefills = PrefillAllocator(budget, partial, self.config, self.blocks.block_size, *chunk_limits)
        # After a preemption, admitting a request would preempt again. If the blocks of a request do not fit, a second
        # lookup of its cached prefix in this step would be wasted.
        pool_is_full = self.num_preemptions > num_preemptions
        if not pool_is_full and prefills.should_admit_first(self._last_admission):
            pool_is_full = not self._fill_slots(plan, prefills, at_most=1)
        prefills.add_running()
        if not pool_is_full:
            pool_is_full = not self._fill_slots(plan, prefills)
        prefills.spread()
        if not pool_is_full:
            self._use_up(plan, prefills)
        for request, num_tokens in prefills.allotments.items():
            self._add_to_plan(plan, request, num_tokens)
        if self.speculation is not None:
            self.speculation.add_drafts(plan, budget, self.running)
        self._publish_prefixes()
        if plan.num_scheduled_tokens:  # an empty plan is not executed, so it must not contain the dropped ids
            if self.connector is not None:
                plan.kv_connector_metadata = self.connector.build_connector_meta(self.states.take_saves())
            self.images.plan(plan)
            plan.dropped_req_ids, self._dropped = self._dropped, []  # last: an error before it loses no id
        return plan

    def _max_chunk_tokens(self, request: Request, num_computed: int) -> int:
        limits = self.states.max_chunk_tokens, self.images.max_chunk_tokens
        return min(limit(request, num_computed) for limit in limits)

    def _plan_whole_prompt(self, request: Request, num_computed: int) -> int:
        limits = self.states.plan_whole_prompt, self.images.max_chunk_tokens
        return min(limit(request, num_computed) for limit in limits)

    def _schedule_decodes(self, plan: SchedulerOutput, budget: StepBudget) -> list[Request]:
        """Schedule decodes of running requests in order, including recomputed drafts. Return the running prefills.

        If the pool has too few free blocks, the last requests in order are preempted.
        """
        prefills = []
        for request in list(self.running.values()):
            if budget.tokens == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an earlier request in this loop
            remaining = num_remaining(request, self.config)
            if remaining > 1 and not self.states.is_rejected(request):
                prefills.append(request)
            elif (num_rows := min(remaining, budget.tokens)) > 0:
                # All computed tokens have blocks, so a single row needs a new block only if its token is the first of a
                # block.
                if num_rows > 1 or request.num_computed_tokens % self.blocks.block_size == 0:
                    new_block_ids = self._allocate_or_preempt(request, request.num_computed_tokens + num_rows)
                    if new_block_ids is None:
                        break  # the request was the last in order and preempted itself
                    if new_block_ids:
                        plan.new_block_ids[request.request_id] = new_block_ids
                budget.take(request.num_computed_tokens, num_rows)
                self._add_to_plan(plan, request, num_rows)
        return [request for request in prefills if request.status is RequestStatus.RUNNING]

    def _fill_slots(self, plan: SchedulerOutput, prefills: PrefillAllocator, at_most: int | None = None) -> bool:
        """Admit up to ``at_most`` waiting requests to free prefill slots. None: no limit.

        Stops at the first request whose minimum allotment or whose blocks do not fit. Returns False if it stopped
        because of the blocks, otherwise True.
        """
        num_free = self.config.max_num_partial_prefills - prefills.num_in_progress
        for _ in range(num_free if at_most is None else min(at_most, num_free)):
            candidate = self._next_candidate(prefills)
            if candidate is None or not prefills.fits_minimum(candidate.request, *candidate.extent):
                break
            if not self._admit(plan, candidate):
                return False
            prefills.take(candidate.request)
        return True

    def _use_up(self, plan: SchedulerOutput, prefills: PrefillAllocator) -> None:
        """Admit more requests within the remaining budget. Stops at the first request that does not fit.

        If no prefill slot is free, a request fits only if its whole prompt does.
        """
        while (candidate := self._next_candidate(prefills)) is not None:
            has_slot = prefills.num_partial < self.config.max_num_partial_prefills
            fits = prefills.fits_any if has_slot else prefills.fits
            if not (has_slot or self.images.can_start(candidate.request, candidate.num_cached_tokens, whole=True)):
                break
            if not fits(candidate.request, *candidate.extent) or not self._admit(plan, candidate):
                break
            prefills.take(candidate.request, whole=not has_slot)
            prefills.spread()

    def _next_candidate(self, prefills: PrefillAllocator) -> Candidate | None:
        """Return the request to admit next, or None if no request can be admitted now.

        No request can be admitted in these cases:

        - The step has no tokens left, or ``max_num_seqs`` requests are running.
        - :meth:`Admissions.next` returns None.
        - The image features for the smallest possible chunk of the returned request do not fit into the step.
        """
        if prefills.step.tokens <= 0 or len(self.running) >= self.config.max_num_seqs:
            return None
        candidate = self.admissions.next(prefills, self.running)
        if candidate is None or self.images.can_start(candidate.request, candidate.num_cached_tokens):
            return candidate
        return None  # the features of its next image do not fit yet

    def _admit(self, plan: SchedulerOutput, candidate: Candidate) -> bool:
        """Admit a request if there are enough free blocks for all its tokens. Return True if it was admitted.

        Beside other running requests, ``WATERMARK`` of the pool must also remain free.
        """
        request = candidate.request
        reserve = self._watermark_blocks if self.running else 0
        block_ids = self.blocks.allocate(
            request.request_id, request.num_tokens, reserve=reserve, cached=candidate.cached
        )
        if block_ids is None:
            return False
        state_slots = self.states.admit(request, candidate.num_cached_tokens, candidate.num_shared_tokens)
        self.admissions.remove(request.request_id)
        self._append_running(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = candidate.num_cached_tokens
        # Blocks from a store are published in the step that writes them.
        known = candidate.cached
        request.num_registered_blocks = known.index(None) if None in known else len(known)
        is_first_admission = request.num_cached_tokens < 0
        if is_first_admission:
            request.num_cached_tokens = candidate.num_cached_tokens
        if self.connector is not None:
            from_store = [i for i, block in enumerate(candidate.cached) if block is None]
            if is_first_admission:
                request.num_external_tokens = len(from_store) * self.blocks.block_size
                self.connector.count_prompt(request)
            self.connector.update_state_after_alloc(request, block_ids, from_store, len(candidate.cached))
        self.held_by_runner.add(request.request_id)
        self._last_admission = plan.step_id
        plan.new_requests.append(NewRequestData.of(request, block_ids, state_slots))
        return True

    def _append_running(self, request: Request) -> None:
        """Insert a request into the running requests, which stay in order of service."""
        last = next(reversed(self.running.values()), None)
        self.running[request.request_id] = request
        if last is not None and request.sort_key < last.sort_key:  # admitted out of order: restore the order
            self.running = dict(sorted(self.running.items(), key=lambda pair: pair[1].sort_key))

    def _add_to_plan(self, plan: SchedulerOutput, request: Request, num_tokens: int) -> None:
        """Plan the next ``num_tokens`` tokens of a request, which has blocks for them.

        If they include its last known token, the step samples (or pools), and the request gets an output placeholder.
        """
        self.states.plan(plan, request)
        plan.num_scheduled_tokens[request.request_id] = num_tokens
        request.num_computed_tokens += num_tokens
        self.images.computed(request)
        request.last_step = plan.step_id
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            done = plan.sampled_req_ids if request.pooling_params is None else plan.pooled_req_ids
            done.append(request.request_id)
            request.num_output_placeholders += 1
        if (
            self._publishes
            and request.num_computed_tokens >= (request.num_registered_blocks + 1) * self.blocks.block_size
        ):
            self._filled.append(request)

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate the missing blocks for the request's first ``num_tokens`` tokens. Return the ids of the new blocks.

        Preempts the last requests in order if necessary. Returns None if ``request`` itself was preempted.
        """
        while True:
            new_block_ids = self.blocks.allocate(request.request_id, num_tokens)
            if new_block_ids is not None:
                return new_block_ids
            last = next(reversed(self.running.values()))
            self._preempt(last)
            if last is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks. Queue the request again, or start to load its KV from a store."""
        del self.running[request.request_id]
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._release(request)
        self.admissions.add(request)

    def preempt_all(self) -> None:
        """Drop all cached prefixes and features, and preempt every running request: all KV is lost."""
        self.forget_cached()
        for request in reversed(list(self.running.values())):
            self._preempt(request)

    def forget_cached(self) -> None:
        """Drop all cached prefixes, and all features of images."""
        self.prefix_cache.forget()
        self.images.forget()

    def failed(self, plan: SchedulerOutput | None = None) -> None:
        """Drop all cached prefixes and features, and void the drafts of a step that has failed or will not run.

        Running requests do not change: see :meth:`cancel`.

        Args:
            plan: plan of the step. None: void the drafts of all steps in flight.
        """
        self.forget_cached()  # the cache may contain blocks that will never be written
        self._filled.clear()  # not empty if an error has interrupted the planning of a step
        if self.speculation is not None:
            self.speculation.failed(plan)

    def refused(self, plan: SchedulerOutput) -> None:
        """Repeat the dropped requests and image features of a plan in the next plan.

        Call it if the runner raised an error for the plan, perhaps before it dropped them.
        """
        self.images.refused(plan)
        self._dropped += [r for r in plan.dropped_req_ids if r not in self.held_by_runner]

    def cancel(self, plan: SchedulerOutput) -> None:
        """Cancel a plan that has failed or will not run. Its requests are preempted and recomputed from their start.

        Includes :meth:`failed`. Plans made after this plan must be cancelled too.
        """
        self.failed(plan)
        for request_id in (*plan.sampled_req_ids, *plan.pooled_req_ids):
            if request_id in self.requests:
                num_drafts = len(plan.scheduled_spec_decode_tokens.get(request_id, ()))
                self.requests[request_id].num_output_placeholders -= 1 + num_drafts
        planned = [self.running[r] for r in plan.num_scheduled_tokens if r in self.running]
        for request in sorted(planned, key=lambda r: r.sort_key, reverse=True):
            self._preempt(request)

    def _release(self, request: Request) -> None:
        """Free a request's blocks, state slots and image features, and requeue the requests that wait for its prefix.

        The next plan makes the runner drop the request.
        """
        self.blocks.free(request.request_id)
        self.states.release(request)
        self.images.release(request)
        request.num_registered_blocks = 0
        self.admissions.release_waiters(request.request_id)
        if self.connector is not None:
            self.connector.forget_request(request)
        if request.request_id in self.held_by_runner:
            self.held_by_runner.remove(request.request_id)
            self._dropped.append(request.request_id)

    def _save_to_store(self, request: Request, start: int, stop: int) -> None:
        assert self.connector is not None
        block_ids = self.blocks.block_ids(request.request_id)[start:stop]
        self.connector.queue_saves(request, request.block_hashes[start:stop], block_ids)

    def _publish_prefixes(self) -> None:
        """Make the blocks that this step fills available to later steps. Requeue the requests that waited for them."""
        for request in self._filled:
            if not self.states.may_go_back(request):
                self._publish(request)
        self._filled.clear()
        self.admissions.prefixes_computed(self.running)

    def _publish(self, request: Request) -> None:
        self.prefix_cache.publish(request)
        self.states.publish(request)

    # --- results --------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, model_output: ModelOutput) -> list[RequestOutput]:
        """Process the tokens and vectors that a step has computed. Finish completed requests and free their blocks.

        Results of requests that have finished since, for example aborted requests, are ignored.

        Returns:
            One output for each request with new tokens, a pooled result or an error. :class:`RequestOutput` names the
            fields that are not filled in.
        """
        outputs = self._finish_pooled(model_output)
        for request_id, is_constrained in model_output.constrained.items():
            if (request := self.requests.get(request_id)) is not None:
                request.is_constrained = is_constrained
        accepted = (
            {} if self.speculation is None else self.speculation.process_results(plan, model_output, self.requests)
        )
        for request_id, token_id in zip(plan.sampled_req_ids, model_output.sampled_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted or stopped while the step was in flight
            if request_id in model_output.errors:
                self.finish_request(request_id, RequestStatus.FINISHED_ERROR)
                error = model_output.errors[request_id]
                outputs.append(RequestOutput(request_id, finish_reason="error", error=error, caused_by_request=True))
                continue
            request.num_output_placeholders -= 1
            token_ids = [*accepted[request_id], token_id] if request_id in accepted else [token_id]
            if request_id in model_output.late_req_ids:
                self._take_back_token(request)
                continue
            request.token_ids += token_ids
            request.num_failures = 0
            status = request.status_after(token_id)
            is_unpublished = len(token_ids) > 1 or request.num_computed_tokens == request.num_tokens
            if status is not None and request.rules.grammar is not None and not self.states.may_go_back(request):
                is_unpublished = True  # nothing recomputes the previous token any more
            if self._publishes and is_unpublished and request.status is RequestStatus.RUNNING:
                self._publish(request)  # its last block was computed before the block's tokens were known
            num_cached, num_external = request.num_cached_tokens, request.num_external_tokens
            output = RequestOutput(request_id, token_ids, num_cached, num_external, request.num_predicted_tokens)
            output.logprobs = model_output.logprobs.get(request_id)
            if status is not None:
                output.finish_reason = status.finish_reason
                if status is RequestStatus.FINISHED_STOPPED and token_id not in request.eos_token_ids:
                    output.stop_reason = token_id
                self.finish_request(request_id, status)
            outputs.append(output)
        return outputs

    def _take_back_token(self, request: Request) -> None:
        """Discard a request's sample, because its grammar mask was late, so that the last row is computed again.

        Suspends the request's drafts. Preempts a request with recurrent states, which can only return to a checkpoint.
        """
        if self.speculation is not None:
            self.speculation.suspend_drafts(request.request_id)
        if request.status is not RequestStatus.RUNNING:
            return
        if self.states.is_used:
            self._preempt(request)  # a recurrent state can only return to a checkpoint
        else:
            request.num_computed_tokens -= 1

    def _finish_pooled(self, model_output: ModelOutput) -> list[RequestOutput]:
        """End the pooling requests whose prompts the step has completed. Return their outputs."""
        outputs = []
        for request_id, pooled in model_output.pooled.items():
            request = self.requests.get(request_id)
            if request is not None:  # otherwise aborted while the step was in flight
                num_cached, num_external = request.num_cached_tokens, request.num_external_tokens
                output = RequestOutput(request_id, [], num_cached, num_external, finish_reason="stop", pooled=pooled)
                output.num_prompt_tokens = request.num_prompt_tokens
                outputs.append(output)
                self.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
        return outputs

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps; for tests and debugging."""
        check_integrity(self)
