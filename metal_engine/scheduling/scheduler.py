"""Who gets how many tokens in the next step.

There is no prefill phase and no decode phase: a step hands out tokens, first to requests with one token left to
compute, then to those with more, running or waiting, until the budget is used up. Fresh prefills, continuation chunks
and decodes share every step. docs/tuning.md explains the rules; the limits on a share are in ``limits.py``, who is
admitted next in ``admission.py``.
"""

from __future__ import annotations

from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import Request, RequestOutput, RequestStatus
from metal_engine.scheduling.admission import Admissions, Candidate
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.checkpoints import RequestStates
from metal_engine.scheduling.integrity import check_integrity
from metal_engine.scheduling.limits import MAX_PROMPT_ROWS, PrefillShares, StepBudget, check_fits, num_remaining
from metal_engine.scheduling.prefix_cache import PrefixCache
from metal_engine.scheduling.proposals import Proposer
from metal_engine.scheduling.speculation import Speculation
from metal_engine.scheduling.state_slots import StateSlots
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import ModelOutput, NewRequestData, SchedulerOutput

# Share of the pool left free when a request is admitted beside others, so that their next tokens do not
# preempt it at once.
WATERMARK = 0.01


class Scheduler:
    """Serves requests in order of priority and arrival, over one token budget and one pool of blocks.

    A request is admitted when blocks for all its tokens are free; it then grows block by block. When the pool
    runs out, the last running request in order is preempted: it loses its blocks, returns to its place among the
    waiting and is recomputed later. The first in order therefore always advances.

    With a connector, a request whose prompt may have KV in a store is set aside (WAITING_FOR_REMOTE_KVS) until it has
    arrived in host memory, and takes its place in the queue then. It holds no blocks before it is admitted.

    With a proposer, which takes ``config.speculative``, what is left of a step goes to drafts.
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
        self.states = RequestStates(slots, cache_config, config.max_num_seqs, connector)
        on_publish = None if connector is None else self._save_to_store
        self.prefix_cache = PrefixCache(self.blocks, cache_config, slots, on_publish)
        self.requests: dict[str, Request] = {}
        self.admissions = Admissions(config, self.prefix_cache, cache_config.block_size, self.states, connector)
        self.running: dict[str, Request] = {}  # in order
        self.speculation = None if proposer is None else Speculation(config, self.blocks, proposer, states=self.states)
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._last_admission = -1  # id of the step that last admitted somebody
        self._watermark_blocks = int(WATERMARK * cache_config.num_blocks)
        # What the runner holds, and what it must forget before the next step.
        self.held_by_runner: set[str] = set()
        self._dropped: list[str] = []
        # Running requests with full blocks that the prefix cache does not know yet; none where nothing is shared.
        self._filled: list[Request] = []
        self._shares = self.prefix_cache.is_enabled or self.states.is_used

    # --- requests come and go -------------------------------------------------------------------------------

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises what :func:`check_fits` raises for a request that could never be served."""
        check_fits(num_prompt_tokens, max_tokens, self.config, self.blocks)

    def add_request(self, request: Request) -> None:
        """Queue a request for which :meth:`check_fits` holds. Raises ValueError if its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        priority = request.options.priority if self.config.scheduling_policy == "priority" else 0
        request.sort_key = (priority, request.arrival)
        self.requests[request.request_id] = request
        self.admissions.add(request)

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a request in any state and free its blocks; unknown ids (finished already) are ignored."""
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
        """Plan one step. With ``--async-scheduling``, called again before :meth:`update` for the step before.

        The plan is empty when all that is left to do waits for steps under way; it need not be executed.
        """
        plan = SchedulerOutput(step_id=self._num_steps)
        self._num_steps += 1
        self.states.begin_step()
        self.admissions.take_in_loaded()
        if self.speculation is not None and self.speculation.waits(self.running, bool(self.admissions.waiting)):
            return plan
        prompt_rows = max(MAX_PROMPT_ROWS, self.blocks.block_size)
        budget = StepBudget(self.config.max_num_batched_tokens, self.config.max_attention_work, prompt_rows)
        num_preemptions = self.num_preemptions
        partial = self._schedule_decodes(plan, budget)
        rooms = self.states.room, self.states.take_at_once
        prefills = PrefillShares(budget, partial, self.config, self.blocks.block_size, *rooms)
        pool_is_full = self.num_preemptions > num_preemptions  # admitting now would preempt again
        if not pool_is_full and prefills.is_turn_of_a_new_one(self._last_admission):
            self._fill_slots(plan, prefills, at_most=1)
        prefills.take_turns()
        if not pool_is_full:
            self._fill_slots(plan, prefills)
        prefills.spread()
        if not pool_is_full:
            self._use_up(plan, prefills)
        for request, share in prefills.shares.items():
            self._add_to_plan(plan, request, share)
        if self.speculation is not None:
            self.speculation.add_drafts(plan, budget, self.running)
        self._publish_prefixes()
        if plan.num_scheduled_tokens:  # an empty plan is not executed, so it must not carry the drops off
            if self.connector is not None:
                plan.kv_connector_metadata = self.connector.build_connector_meta(self.states.take_saves())
            plan.dropped_req_ids, self._dropped = self._dropped, []
        return plan

    def _schedule_decodes(self, plan: SchedulerOutput, budget: StepBudget) -> list[Request]:
        """Give running requests in order their next token, with drafts to compute again; returns those with more."""
        prefills = []
        for request in list(self.running.values()):
            if budget.tokens == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier one in this loop
            remaining = num_remaining(request, self.config)
            if remaining > 1 and not self.states.is_rejected(request):
                prefills.append(request)
            elif (num_rows := min(remaining, budget.tokens)) > 0:
                # All computed tokens have blocks, so of one row only the first token of a block can need one.
                if num_rows > 1 or request.num_computed_tokens % self.blocks.block_size == 0:
                    new_block_ids = self._allocate_or_preempt(request, request.num_computed_tokens + num_rows)
                    if new_block_ids is None:
                        break  # the request was the last in order and preempted itself
                    if new_block_ids:
                        plan.new_block_ids[request.request_id] = new_block_ids
                budget.take(request.num_computed_tokens, num_rows)
                self._add_to_plan(plan, request, num_rows)
        return [request for request in prefills if request.status is RequestStatus.RUNNING]

    def _fill_slots(self, plan: SchedulerOutput, prefills: PrefillShares, at_most: int | None = None) -> None:
        """Admit waiting requests to the free slots for partial prefills, while there is a block for each."""
        num_free = self.config.max_num_partial_prefills - prefills.num_in_progress
        for _ in range(num_free if at_most is None else min(at_most, num_free)):
            candidate = self._next_candidate(prefills)
            if candidate is None or not prefills.has_room(candidate.request, *candidate.extent):
                break
            if not self._admit(plan, candidate):
                break
            prefills.take(candidate.request)

    def _use_up(self, plan: SchedulerOutput, prefills: PrefillShares) -> None:
        """Admit further requests to the budget that is left: to slots free by now, or with their whole prompts."""
        while (candidate := self._next_candidate(prefills)) is not None:
            has_slot = prefills.num_partial < self.config.max_num_partial_prefills
            has_room = prefills.has_some_room if has_slot else prefills.fits
            if not has_room(candidate.request, *candidate.extent) or not self._admit(plan, candidate):
                break
            prefills.take(candidate.request, whole=not has_slot)
            prefills.spread()

    def _next_candidate(self, prefills: PrefillShares) -> Candidate | None:
        """Returns the request to admit next; None if there is none, or nothing left to give it."""
        if prefills.step.tokens <= 0 or len(self.running) >= self.config.max_num_seqs:
            return None
        return self.admissions.next(prefills)

    def _admit(self, plan: SchedulerOutput, candidate: Candidate) -> bool:
        """Start running a request, if there are blocks for all its tokens."""
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
        # Blocks that come from a store are published with the step that writes them.
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
        """Put a request among the running ones, which stay in order of service."""
        last = next(reversed(self.running.values()), None)
        self.running[request.request_id] = request
        if last is not None and request.sort_key < last.sort_key:  # others were admitted past it
            self.running = dict(sorted(self.running.items(), key=lambda pair: pair[1].sort_key))

    def _add_to_plan(self, plan: SchedulerOutput, request: Request, share: int) -> None:
        """Plan ``share`` tokens of a request, and a placeholder for what it comes to if these are its last."""
        self.states.plan(plan, request)
        plan.num_scheduled_tokens[request.request_id] = share
        request.num_computed_tokens += share
        request.last_step = plan.step_id
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            done = plan.sampled_req_ids if request.pooling_params is None else plan.pooled_req_ids
            done.append(request.request_id)
            request.num_output_placeholders += 1
        if self._shares and request.num_computed_tokens >= (request.num_registered_blocks + 1) * self.blocks.block_size:
            self._filled.append(request)

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Returns the new blocks that ``num_tokens`` tokens take; preempts the last requests in order to get them.

        Returns None if that preempted ``request`` itself.
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
        """Take a running request's blocks, and have it computed again later."""
        del self.running[request.request_id]
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._release(request)
        self.admissions.add(request)

    def preempt_all(self) -> None:
        """Have every running request computed again from its start, in the same order: their KV is gone."""
        self.prefix_cache.forget()
        for request in reversed(list(self.running.values())):
            self._preempt(request)

    def failed(self, plan: SchedulerOutput | None = None) -> None:
        """Forget what hangs on a step that has failed, or will not be run; None: on all that have not ended."""
        self.prefix_cache.forget()  # it shared blocks that may never be written
        if self.speculation is not None:
            self.speculation.failed(plan)

    def refused(self, plan: SchedulerOutput) -> None:
        """Repeat a plan's drops in the next plan: the runner raised, perhaps before it took them in."""
        self._dropped += [r for r in plan.dropped_req_ids if r not in self.held_by_runner]

    def cancel(self, plan: SchedulerOutput) -> None:
        """Take back a plan that will not be run: what it planned is computed again from its start.

        Plans made after it must be cancelled too.
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
        """Free a request's blocks, and let go all that depended on them."""
        self.blocks.free(request.request_id)
        self.states.release(request)
        request.num_registered_blocks = 0
        self.admissions.owner_left(request.request_id)
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
        """Let later steps share the blocks that this one fills, and the requests go on that waited for them."""
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
        """Take in what a step sampled and pooled; finish the requests that are done and free their blocks.

        Returns:
            The new tokens of each request and whether they end it; text and counts of tokens are not filled in.
        """
        outputs = self._finish_pooled(model_output)
        accepted = {} if self.speculation is None else self.speculation.settle(plan, model_output, self.requests)
        for request_id, token_id in zip(plan.sampled_req_ids, model_output.sampled_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted, or stopped, while the step was under way
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
            status = request.status_after(token_id)
            is_behind = len(token_ids) > 1 or request.num_computed_tokens == request.num_tokens
            if self._shares and is_behind and request.status is RequestStatus.RUNNING:
                self._publish(request)  # its last block was computed before its tokens were known
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
        """Have the last token of a running request computed again."""
        if self.speculation is not None:
            self.speculation.hold_up(request.request_id)
        if request.status is not RequestStatus.RUNNING:
            return
        if self.states.is_used:
            self._preempt(request)  # its state has gone on, and goes back to a checkpoint at most
        else:
            request.num_computed_tokens -= 1

    def _finish_pooled(self, model_output: ModelOutput) -> list[RequestOutput]:
        """End the requests that were to be pooled; they end with their prompts."""
        outputs = []
        for request_id, pooled in model_output.pooled.items():
            request = self.requests.get(request_id)
            if request is not None:  # else aborted while the step was under way
                num_cached, num_external = request.num_cached_tokens, request.num_external_tokens
                output = RequestOutput(request_id, [], num_cached, num_external, finish_reason="stop", pooled=pooled)
                output.num_prompt_tokens = request.num_prompt_tokens
                outputs.append(output)
                self.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
        return outputs

    def check_integrity(self) -> None:
        """Assert every invariant between steps; for tests and debugging."""
        check_integrity(self)
