"""Speculative decoding: adds drafts to plans, and handles the rejected drafts.

A draft is a token that a request is likely to generate. The draft is computed in the same step as the request's last
known token. A request with k drafts has 1 + k rows in a step, and samples at each row. A draft that differs from the
token sampled at the row before it is rejected, as are all drafts after it. Drafts only get the part of the step's token
budget that running requests and prompts do not use.

A recurrent state cannot return to the last accepted draft. The state before the drafts is therefore kept. If a draft is
rejected, the request's next step starts from that state and recomputes the accepted drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.recurrent_states import RecurrentStates
from metal_engine.scheduling.speculation.async_planning import AsyncPlanning
from metal_engine.scheduling.speculation.draft_capacity import DraftCapacity, max_drafts
from metal_engine.scheduling.speculation.draft_costs import DraftCosts
from metal_engine.scheduling.speculation.draft_gain import DraftGain, UnmeasuredGain
from metal_engine.scheduling.speculation.draft_lengths import DraftLengths, choose_lengths
from metal_engine.scheduling.speculation.proposals import Proposals, Proposer, make_costs
from metal_engine.scheduling.speculation.step_times import StepTimes
from metal_engine.scheduling.token_allotment import StepBudget, num_remaining
from metal_engine.settings.config import SchedulerConfig
from metal_engine.step import UNKNOWN_DRAFT, Drafting, ModelOutput, SchedulerOutput

# Maximum number of rows, without drafts, of a recurrent request in a step with drafts. If a draft is rejected, the
# state does not advance, and the next step must recompute these rows.
_MAX_ROWS_AGAIN = 16


class Speculation:
    """Adds as many drafts to plans as are worth their cost, and rolls back rejected drafts.

    Args:
        config: limits on the drafts of a request and of a step.
        blocks: block pool. Drafts use free blocks only; no request is preempted for them.
        proposer: source of drafts.
        times: measured step times. Default: an empty record.
        costs: measured costs of the drafts that the runner computes. Default: an empty record if the runner computes
            drafts, otherwise none.
        states: recurrent states of running requests; None for models without recurrent layers.
        async_planning: measured times of asynchronously planned steps. Default: an empty record.
        gain: measured rates with and without drafts. Default: an empty record with a draft head, otherwise none, so
            that drafts never pause.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        proposer: Proposer,
        times: StepTimes | None = None,
        costs: DraftCosts | None = None,
        *,
        states: RecurrentStates | None = None,
        async_planning: AsyncPlanning | None = None,
        gain: DraftGain | None = None,
    ) -> None:
        assert config.speculative is not None
        self._config = config
        self._max_sample_rows = config.max_sample_rows
        self._blocks = blocks
        self._states = states if states is not None and states.is_used else None
        self._times = times if times is not None else StepTimes()
        self._async_planning = async_planning if async_planning is not None else AsyncPlanning()
        self._costs = costs = costs or make_costs(config.speculative)
        self._proposals = Proposals(config.speculative, proposer, costs)
        self._is_head = not proposer.acceptance.is_shared
        self._gain = gain or (DraftGain() if self._is_head else UnmeasuredGain())
        self._is_probe = False  # True if the last planned step has a probe, a draft not expected to be worth its cost
        # True if the step before the current one had a probe, so that the current step was not planned asynchronously.
        self._follows_probe = False
        self._num_plain_rows = 0  # rows of the last planned step without its drafts; 0 if it also prefills
        self._was_worth_waiting = False  # True if planning of the next step waits for tokens, because of drafts
        self._probe_request: Request | None = None  # request whose probe the planning of the next step waits for
        self._in_flight: set[str] = set()  # requests with drafts in flight
        self._steps: set[int] = set()  # ids of steps in flight; only used with --async-scheduling

    # --- when to wait for tokens ---

    def should_wait_for_tokens(self, running: Mapping[str, Request], others_wait: bool) -> bool:
        """Return True if planning of the next step must wait for the tokens in flight.

        This holds if a step in flight has drafts. It also holds if all of these are true:

        - An asynchronously planned step would only decode.
        - The step has capacity for drafts.
        - With drafts, the step is expected to yield more tokens per second, or a probe of the runner's drafts is due.

        The expected number of tokens is computed with drafts that follow the tokens known now. The first of these
        drafts are guesses for the tokens in flight. A draft model or head runs when all tokens are known, so its drafts
        include no guesses.

        Call it once before each plan: the waits are counted (:meth:`AsyncPlanning.may_wait`).

        Args:
            running: all running requests.
            others_wait: True if requests are waiting for admission.
        """
        if not self._config.async_scheduling:
            return False
        if self._in_flight:
            return True
        if others_wait and len(running) < self._config.max_num_seqs:
            return False
        requests = [r for r in running.values() if r.num_output_tokens + r.num_output_placeholders < r.max_tokens]
        remaining = [num_remaining(r, self._config) for r in requests]
        # Maximum number of drafts in a step with only these requests.
        most = min(self._config.max_num_batched_tokens, self._max_sample_rows) - len(requests)
        is_ahead = any(r.num_output_placeholders for r in requests)
        only_decodes = all(r.num_output_tokens or r.num_output_placeholders for r in requests)
        # If every request needs its tokens on the host, no step can be planned asynchronously anyway: do not wait.
        if not is_ahead or not only_decodes or max(remaining) != 1 or most <= 0:
            return False
        self._proposals.begin_step(allows_head=self._gain.may_draft(len(requests)))
        times = self._times.times(len(requests), most)
        # Step times beyond the measured sizes are assumed not to grow, so that these sizes are tried and measured.
        hoped = [*times, *(times[-1:] or [1.0]) * (1 + most - len(times))]
        proposals, others = self._proposals.select(requests, len(requests), hoped, num_planned=0)
        self._proposals.record_untried_drafts(others)
        for request, drafts in proposals.items():
            self._proposals.record_untried(request, drafts)
        capacity = self._capacity_after(requests)
        limits = [capacity.take(r, len(drafts) - r.num_output_placeholders) for r, drafts in proposals.items()]
        self._was_worth_waiting = any(limits) and (
            not times or self._beats_async(proposals, limits, requests, times, hoped)
        )
        if self._is_head:  # a head always proposes drafts, even if all of them are rejected
            self._was_worth_waiting = self._was_worth_waiting and self._async_planning.may_wait()
        if self._was_worth_waiting:
            return True
        tried = self._proposals.pick_probe_request([*proposals, *others])
        if tried is None or not self._capacity_after(requests).take(tried, 1):
            return False
        self._probe_request = tried
        return True

    def _capacity_after(self, requests: list[Request]) -> DraftCapacity:
        return DraftCapacity(requests, self._config.max_attention_work, self._blocks, self._states)

    def _beats_async(
        self,
        proposals: dict[Request, list[int]],
        limits: list[int],
        requests: list[Request],
        times: list[float],
        hoped: list[float],
    ) -> bool:
        """Return True if a step with drafts is expected to yield more tokens per second than asynchronous steps.

        Args:
            limits: for each proposal, number of drafts after the tokens in flight that fit into the capacity.
            times: step times by number of drafts, as far as measured.
            hoped: ``times`` extended to the maximum number of drafts.
        """
        pending = [self._proposals.num_guesses(r, drafts) for r, drafts in proposals.items()]
        acceptances = [self._proposals.acceptance.of(r.request_id, drafts) for r, drafts in proposals.items()]
        chances = [p**n for p, n in zip(acceptances, pending, strict=True)]
        num_again = [1] * len(limits) if self._states is not None else None
        choice = self._choice(proposals, acceptances, limits, len(requests), times, num_again, chances)
        if sum(choice.lengths) == len(times) - 1:  # all measured sizes are used: consider larger steps
            choice = self._choice(proposals, acceptances, limits, len(requests), hoped, num_again, chances)
        return self._pays(requests, choice)

    def _pays(self, requests: list[Request], choice: DraftLengths) -> bool:
        """Return True if the step has drafts and yields more tokens per second than asynchronously planned steps."""
        num_waiting = sum(request.needs_token_on_host for request in requests)
        # A request that needs its tokens on the host can be in every second asynchronously planned step only.
        return any(choice.lengths) and self._async_planning.is_slower(len(requests) - num_waiting / 2, choice)

    # --- planning ---

    def add_drafts(self, plan: SchedulerOutput, budget: StepBudget, running: Mapping[str, Request]) -> None:
        """Add drafts to the requests that sample in the plan, within the remaining budget.

        Adds no drafts to a plan that is made asynchronously, while another step is in flight. For other plans, also
        fills in ``plan.draft_model_req_ids``.
        """
        scheduled = plan.num_scheduled_tokens
        if not scheduled:
            return  # nothing to schedule until the steps in flight finish
        # The last chunk of a prompt has no drafts.
        decoding = [request for r in plan.sampled_req_ids if self._decodes(request := running[r], scheduled[r])]
        num_rows = sum(scheduled[request.request_id] for request in decoding)
        only_decodes = len(decoding) == len(scheduled)
        for new in plan.new_requests:
            self._proposals.admitted(new.request_id)
        was_worth_waiting, self._was_worth_waiting = self._was_worth_waiting, False
        probe_request, self._probe_request = self._probe_request, None
        if self._steps:  # planned asynchronously
            self._proposals.planned_async(scheduled)
            self._async_planning.planned(plan.step_id, num_rows if only_decodes else 0)
            if only_decodes:
                self._gain.planned(plan, len(decoding))
            self._steps.add(plan.step_id)
            return
        if self._config.async_scheduling:
            self._steps.add(plan.step_id)
        # If timing does not start here, it started at the end of the previous step, and so includes the host's work
        # between the steps.
        if not self._config.async_scheduling or len(plan.new_requests) == len(scheduled):
            self._times.start()
        self._is_probe = False
        self._proposals.begin_step(allows_head=self._gain.may_draft(len(decoding)))
        most = min(budget.tokens, self._max_sample_rows - len(plan.sampled_req_ids))
        may_have_drafts = decoding and most > 0 and budget.attention_work > 0
        times = self._times.times(num_rows, most) if may_have_drafts else []
        usable = [request for request in decoding if self._can_have_drafts(plan, request)]
        proposals, others = self._proposals.select(usable, len(decoding), times)
        # If all requests need their tokens on the host, no step could have been planned asynchronously instead.
        may_pay = was_worth_waiting or all(request.needs_token_on_host for request in decoding)
        chosen = self._chosen(proposals, decoding, times, plan, may_pay=may_pay)
        num_drafts = sum(self._add(plan, budget, request, drafts) for request, drafts in chosen)
        if was_worth_waiting:
            self._async_planning.waited(has_drafts=num_drafts > 0)
        self._proposals.record_untried_drafts(others)
        # Likely drafts may still not be worth their cost: they are probed, too.
        unpaid = [probe_request] if probe_request in (*proposals, *others) else [*proposals, *others]
        if times and not num_drafts and (tried := self._proposals.pick_probe_request(unpaid)) is not None:
            num_drafts = self._add(plan, budget, tried, [UNKNOWN_DRAFT])
            self._is_probe = num_drafts > 0
        is_measured = num_drafts > 0 or was_worth_waiting or not self._config.async_scheduling
        if is_measured and only_decodes and not (self._is_probe or self._follows_probe):
            self._gain.planned(plan, len(decoding), waited=was_worth_waiting)
        self._schedule_draft_prefill(plan, running)
        self._num_plain_rows = num_rows if only_decodes else 0
        self._times.planned(num_rows + num_drafts if only_decodes else 0)

    def _can_have_drafts(self, plan: SchedulerOutput, request: Request) -> bool:
        return self._states is None or plan.num_scheduled_tokens[request.request_id] <= _MAX_ROWS_AGAIN

    def _decodes(self, request: Request, num_rows: int) -> bool:
        return num_rows == 1 or (self._states is not None and self._states.recomputes_drafts(request))

    def _schedule_draft_prefill(self, plan: SchedulerOutput, running: Mapping[str, Request]) -> None:
        """Have the draft model also prefill the prompts whose requests will probably have drafts of the draft model."""
        if self._costs is None or not self._costs.has_prefill:
            return
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            is_prompt = request_id not in plan.scheduled_spec_decode_tokens and num_tokens > 1
            if is_prompt and self._proposals.may_pay_off(running[request_id]):
                plan.draft_model_req_ids.append(request_id)

    def _choice(
        self,
        proposals: dict[Request, list[int]],
        acceptances: list[float],
        limits: list[int],
        num_sampling: int,
        times: list[float],
        num_again: list[int] | None,
        chances: list[float] | None = None,
    ) -> DraftLengths:
        catching_up = [self._proposals.catching_up_seconds(request, drafts) for request, drafts in proposals.items()]
        choose = partial(choose_lengths, acceptances, num_sampling=num_sampling, times=times, num_again=num_again)
        choose = partial(choose, chances=chances, draft_seconds=self._proposals.draft_seconds, catching_up=catching_up)
        choose = partial(choose, are_computed=[drafts[0] == UNKNOWN_DRAFT for drafts in proposals.values()])
        choice = choose(limits=limits)
        if any(catching_up):  # the catch-up cost of one request must not cost others their drafts
            near = [0 if behind else limit for behind, limit in zip(catching_up, limits, strict=True)]
            choice = max(choice, choose(limits=near), key=lambda choice: choice.tokens / choice.seconds)
        return choice

    def _chosen(
        self,
        proposals: dict[Request, list[int]],
        decoding: list[Request],
        times: list[float],
        plan: SchedulerOutput,
        *,
        may_pay: bool,
    ) -> list[tuple[Request, list[int]]]:
        """Return the leading drafts of each request that are worth their cost.

        Args:
            may_pay: True if the drafts need no comparison with an asynchronously planned step. Either an earlier
                comparison favored the drafts, or no step could have been planned asynchronously.
        """
        if not proposals:
            return []
        acceptances = [self._proposals.acceptance.of(r.request_id, drafts) for r, drafts in proposals.items()]
        limits = list(map(len, proposals.values()))
        num_again = None if self._states is None else [plan.num_scheduled_tokens[r.request_id] for r in proposals]
        choice = self._choice(proposals, acceptances, limits, len(decoding), times, num_again)
        pays = not self._config.async_scheduling or may_pay or self._pays(decoding, choice)
        chosen = []
        for (request, drafts), length in zip(proposals.items(), choice.lengths, strict=True):
            if length and pays:
                chosen.append((request, drafts[:length]))
            else:
                self._proposals.record_untried(request, drafts)
        return chosen

    def _add(self, plan: SchedulerOutput, budget: StepBudget, request: Request, drafts: list[int]) -> int:
        """Plan as many leading drafts of a request as the limits on drafts allow (:func:`max_drafts`).

        Return the number of planned drafts; 0 if the recurrent state before them cannot be kept.
        """
        num_computed, blocks = request.num_computed_tokens, self._blocks
        num_tokens = blocks.num_held_tokens(request.request_id) + blocks.num_free_blocks * blocks.block_size
        limit = max_drafts(request, num_computed, budget.attention_work, num_tokens, self._states)
        drafts = self._with_blocks(request, plan, drafts[:limit])
        if drafts:
            plan.scheduled_spec_decode_tokens[request.request_id] = drafts
            plan.num_scheduled_tokens[request.request_id] += len(drafts)
            budget.take(request.num_computed_tokens, len(drafts))
            request.num_computed_tokens += len(drafts)
            request.num_output_placeholders += len(drafts)
            self._in_flight.add(request.request_id)
        return len(drafts)

    def _with_blocks(self, request: Request, plan: SchedulerOutput, drafts: list[int]) -> list[int]:
        """Keep the recurrent state before the drafts, allocate blocks for the drafts, and return the drafts.

        Return an empty list if the state cannot be kept.
        """
        request_id, start = request.request_id, request.num_computed_tokens
        if drafts and self._states is not None and not self._states.keep_for_drafts(plan, request):
            return []
        if drafts:
            new_block_ids = self._blocks.allocate(request_id, start + len(drafts))
            assert new_block_ids is not None
            if new_block_ids:
                plan.new_block_ids.setdefault(request_id, []).extend(new_block_ids)
        return drafts

    # --- results ---

    def process_results(
        self, plan: SchedulerOutput, model_output: ModelOutput, requests: Mapping[str, Request]
    ) -> dict[str, list[int]]:
        """Roll back the rejected drafts of a step, free blocks that only they used, and record times and acceptance.

        Returns:
            The accepted drafts of each request, which have not been appended to its tokens yet.
        """
        self._steps.discard(plan.step_id)
        self._end_step(plan, model_output, requests)
        accepted = {}
        for request_id, planned in plan.scheduled_spec_decode_tokens.items():
            request = requests.get(request_id)
            if request is None:
                continue  # aborted while the step was in flight
            drafts = model_output.drafts_of(plan, request_id)
            num_accepted = model_output.num_accepted_tokens[request_id]
            self._in_flight.discard(request_id)
            request.num_output_placeholders -= len(planned)
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens -= len(planned) - len(drafts)  # rows of missing drafts
                num_rows = plan.num_scheduled_tokens[request_id] - (len(planned) - len(drafts))
                self._take_back(request, num_rows, len(drafts) - num_accepted)
                self._blocks.trim(request_id, request.num_tokens + num_accepted)
            accepted[request_id] = drafts[:num_accepted]
            before = request.num_draft_tokens
            request.num_draft_tokens = before[0] + len(drafts), before[1] + num_accepted
            if request_id not in model_output.late_req_ids and request_id not in model_output.errors:
                self._proposals.record_result(request, planned, len(drafts), num_accepted)
        return accepted

    def _end_step(self, plan: SchedulerOutput, output: ModelOutput, requests: Mapping[str, Request]) -> None:
        planned, drafting = plan.scheduled_spec_decode_tokens, output.drafting
        if drafting is not None and any(len(drafts) < len(planned[r]) for r, drafts in drafting.token_ids.items()):
            self._times.planned(0)  # fewer rows ran than planned, because drafts were missing: do not record the time
        seconds = self._times.end(0.0 if drafting is None else drafting.seconds)
        if self._costs is not None:
            is_slowed = self._is_probe or self._follows_probe
            added = self._added_seconds(seconds, drafting) if is_slowed else 0.0
            self._costs.measured(seconds, drafting, requests, probe_seconds=added)
        self._gain.ended(plan.step_id, len(plan.sampled_req_ids) + sum(output.num_accepted_tokens.values()))
        self._is_probe, self._follows_probe = False, self._is_probe and self._config.async_scheduling
        if self._config.async_scheduling:
            self._async_planning.ended(plan.step_id)
            self._times.start()  # the next time includes the host's work between steps, which only async planning hides

    def _added_seconds(self, seconds: float, drafting: Drafting | None) -> float:
        """Estimate how much longer a step of ``seconds`` took than the same step without drafts, in seconds.

        The result is at least the time of the draft model or head. It is exactly that time if the step also prefilled,
        or if no comparable step without drafts was measured.
        """
        known = self._async_planning.seconds(self._num_plain_rows) if self._config.async_scheduling else None
        if known is None:
            known = next(iter(self._times.times(self._num_plain_rows, 0)), seconds)
        added = seconds - known if self._num_plain_rows else 0.0
        return max(added, 0.0 if drafting is None else drafting.seconds)

    def _take_back(self, request: Request, num_rows: int, num_rejected: int) -> None:
        """Roll back a request's ``num_rejected`` rejected drafts.

        With a recurrent state, any rejected draft rolls back all ``num_rows`` rows that the request had in the step.
        """
        if self._states is None:
            request.num_computed_tokens -= num_rejected
            return
        if num_rejected:
            request.num_computed_tokens -= num_rows
        self._states.record_draft_result(request, is_rejected=num_rejected > 0)

    def failed(self, plan: SchedulerOutput | None) -> None:
        """Void the drafts of a plan that has failed or will not run. None: the drafts of all steps in flight."""
        steps = set(self._steps) if plan is None else {plan.step_id}
        self._steps -= steps
        self._in_flight.difference_update(self._in_flight.copy() if plan is None else plan.scheduled_spec_decode_tokens)
        self._times.start()  # time the next step from now, and do not measure the step in flight
        self._async_planning.failed(steps)
        self._gain.failed()

    def suspend_drafts(self, request_id: str) -> None:
        """Suspend drafts of a request for the next plan: its grammar has not returned the last mask yet."""
        self._proposals.suspend_drafts(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the data of a request that has ended."""
        self._in_flight.discard(request_id)
        if self._probe_request is not None and self._probe_request.request_id == request_id:
            self._probe_request = None
        self._proposals.forget(request_id)
