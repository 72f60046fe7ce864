"""Drafts: tokens that a request is likely to generate, computed in one step with its last known token.

A request with k drafts has 1 + k rows in a step, and samples at each of them. The first draft that is not what was
sampled before it is rejected with all after it. Drafts take what running requests and prompts have left of a step.

A recurrent state cannot go back to the last accepted draft: the one from before the drafts is kept, and where a draft
is rejected the request's next step begins there and computes the accepted ones again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.ahead import AheadTimes
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.checkpoints import RequestStates
from metal_engine.scheduling.draft_lengths import Acceptance, Choice, StepTimes, choose_lengths, least_gain
from metal_engine.scheduling.limits import StepBudget, num_remaining, rows_for_work
from metal_engine.settings.config import SchedulerConfig
from metal_engine.step import ModelOutput, SchedulerOutput

# Requests of a step whose drafts would not pay, and that have one noted only to be compared with what comes. To find
# drafts takes the host some microseconds.
_MAX_NOTED = 4
# Rows of a request with a recurrent state that a step computes without drafts: where there are more, it has none, since
# the state gets on only when none is rejected.
_MAX_ROWS_AGAIN = 16


class Proposer(Protocol):
    """Where drafts come from."""

    def begin_step(self) -> None:
        """Called before the proposals of a step."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Returns what may follow the request's tokens, ``num_tokens`` tokens at most."""

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Called when the first ``num_drafts`` tokens of the last proposal have been tried."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; it has ended."""


class Speculation:
    """Adds drafts to plans, as many as pay, and takes back what they took when they are rejected.

    Args:
        config: how many drafts a request and a step may have.
        blocks: the pool; drafts take blocks that are free, and nobody is preempted for them.
        proposer: where drafts come from.
        times: how long steps take; measured from now on if not given.
        states: recurrent states of running requests; None for a pool of blocks alone.
        ahead: how long steps take that are planned ahead; measured from now on if not given.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        proposer: Proposer,
        times: StepTimes | None = None,
        *,
        states: RequestStates | None = None,
        ahead: AheadTimes | None = None,
    ) -> None:
        assert config.speculative is not None
        self._config = config
        self._num_drafts = config.speculative.num_speculative_tokens
        self._max_sample_rows = config.max_sample_rows
        self._blocks = blocks
        self._proposer = proposer
        self._states = states if states is not None and states.is_used else None
        self._times = times if times is not None else StepTimes()
        self._ahead = ahead if ahead is not None else AheadTimes()
        self._acceptance = Acceptance()
        self._held_up: set[str] = set()
        self._noted: dict[str, tuple[int, int]] = {}  # request id -> index of a token, and a draft of it
        self._under_way: set[str] = set()  # requests with drafts that are not settled
        self._turn = 0

    def waits(self, running: Mapping[str, Request], others_wait: bool) -> bool:
        """Whether a step must not be planned before the tokens of those under way are known.

        It must not if one of those has drafts. Else it waits if all it would do ahead is to decode, and if it can be
        expected to give more tokens a second with drafts: those of what is known now, of which the first stand for
        the tokens under way.

        Args:
            running: all running requests.
            others_wait: whether there are requests to admit.
        """
        if not self._config.async_scheduling:
            return False
        if self._under_way:
            return True
        if others_wait and len(running) < self._config.max_num_seqs:
            return False
        requests = [r for r in running.values() if r.num_output_tokens + r.num_output_placeholders < r.max_tokens]
        remaining = [num_remaining(r, self._config) for r in requests]
        # Drafts that fit into a step of these requests alone.
        most = min(self._config.max_num_batched_tokens, self._max_sample_rows) - len(requests)
        is_ahead = any(r.num_output_placeholders for r in requests)
        only_decodes = all(r.num_output_tokens or r.num_output_placeholders for r in requests)
        if not is_ahead or not only_decodes or max(remaining) > 1 or most <= 0:
            return False
        self._proposer.begin_step()
        times = self._times.times(len(requests), most)
        # Where nothing is known of steps with drafts, that is to be found out.
        known = times or [1.0] * (1 + self._num_drafts)
        usable = [r for r in requests if r.request_id not in self._held_up]
        proposals = self._propose(usable, len(requests), known, num_planned=0)
        for request, drafts in proposals.items():
            self._note(request, drafts)
        if not proposals or not times:
            return bool(proposals)
        acceptances = [self._acceptance.of(r.request_id) for r in proposals]
        num_pending = [r.num_output_placeholders for r in proposals]
        limits = [max(0, len(drafts) - n) for drafts, n in zip(proposals.values(), num_pending, strict=True)]
        chances = [p**n for p, n in zip(acceptances, num_pending, strict=True)]
        num_again = [1] * len(limits) if self._states is not None else None
        choice = choose_lengths(acceptances, limits, len(requests), times, num_again=num_again, chances=chances)
        return self._pays(sum(remaining), choice)

    def _pays(self, num_ahead: int, choice: Choice) -> bool:
        """Whether a step has drafts, and gives more tokens a second than one that is planned ahead, of so many rows."""
        return any(choice.lengths) and self._ahead.is_slower(num_ahead, choice)

    def add_drafts(self, plan: SchedulerOutput, budget: StepBudget, running: Mapping[str, Request]) -> None:
        """Give the requests that sample in a plan drafts, out of what is left of its budget."""
        scheduled = plan.num_scheduled_tokens
        # The end of a prompt is a chunk among chunks, and has no drafts.
        decoding = [request for r in plan.sampled_req_ids if self._decodes(request := running[r], scheduled[r])]
        num_rows = sum(scheduled[request.request_id] for request in decoding)
        only_decodes = len(decoding) == len(scheduled)
        if any(request.num_output_placeholders > 1 for request in decoding):  # planned ahead
            self._ahead.planned(plan.step_id, num_rows if only_decodes else 0)
            return
        if not self._config.async_scheduling:
            self._times.start()
        self._proposer.begin_step()
        most = min(budget.tokens, self._max_sample_rows - len(plan.sampled_req_ids))
        has_room = decoding and most > 0 and budget.attention_work > 0
        times = self._times.times(num_rows, most) if has_room else []
        usable = [request for request in decoding if self._may_get_on(plan, request)]
        proposals = self._propose(usable, len(decoding), times)
        for request, drafts in self._chosen(proposals, len(decoding), times, plan):
            num_rows += self._add(plan, budget, request, drafts)
        self._times.planned(num_rows if only_decodes else 0)

    def _may_get_on(self, plan: SchedulerOutput, request: Request) -> bool:
        return self._states is None or plan.num_scheduled_tokens[request.request_id] <= _MAX_ROWS_AGAIN

    def _decodes(self, request: Request, num_rows: int) -> bool:
        return num_rows == 1 or (self._states is not None and self._states.computes_again(request))

    def _propose(
        self, decoding: list[Request], num_sampling: int, times: list[float], num_planned: int = 1
    ) -> dict[Request, list[int]]:
        """Returns the drafts of the requests whose drafts are likely enough to pay, as many as fit into the step.

        Of some of the others the next draft is only noted, to see whether it comes.

        Args:
            num_planned: of each request's tokens that are not known yet, those that this step samples: 1, or 0 if it is
                not planned. Drafts begin with what stands for the others.
        """
        least = least_gain(num_sampling, times)
        proposals: dict[Request, list[int]] = {}
        others = []
        room = len(times) - 1
        for request in decoding:
            num_pending = request.num_output_placeholders - num_planned
            if not self._may_have_drafts(request, num_pending):
                continue
            self._compare(request)
            if room <= 0 or self._acceptance.of(request.request_id) < least:
                others.append(request)
            elif drafts := self._drafts(request, self._most(request, num_pending)):
                proposals[request] = drafts
                room -= len(drafts)
        for i in range(min(_MAX_NOTED, len(others))):
            request = others[(self._turn + i) % len(others)]
            self._note(request, self._drafts(request, 1))
        self._turn += _MAX_NOTED
        return proposals

    def _may_have_drafts(self, request: Request, num_pending: int) -> bool:
        if request.request_id in self._held_up:
            self._held_up.remove(request.request_id)
            return False
        return request.options.use_speculation and self._most(request, num_pending) > num_pending

    def _most(self, request: Request, num_pending: int) -> int:
        # The last token that it may generate needs no draft: it is sampled after the one before it.
        return min(self._num_drafts + num_pending, request.max_tokens - request.num_output_tokens - 1)

    def _drafts(self, request: Request, most: int) -> list[int]:
        drafts = self._proposer.propose(request, most)
        # A token that would end the request can be sampled, but nothing comes after it.
        end = next((i for i, token_id in enumerate(drafts) if token_id in request.stop_token_id_set), len(drafts))
        return drafts[:end]

    def _note(self, request: Request, drafts: list[int]) -> None:
        if drafts:
            self._noted[request.request_id] = request.num_tokens, drafts[0]

    def _compare(self, request: Request) -> None:
        """See whether a draft that was only noted has come."""
        index, draft = self._noted.pop(request.request_id, (request.num_tokens, -1))
        if index < request.num_tokens:
            self._acceptance.tried(request.request_id, 1, int(request.token_ids[index] == draft))

    def _chosen(
        self, proposals: dict[Request, list[int]], num_sampling: int, times: list[float], plan: SchedulerOutput
    ) -> list[tuple[Request, list[int]]]:
        """Returns of each request's drafts the first, as many as pay."""
        if not proposals:
            return []
        acceptances = [self._acceptance.of(request.request_id) for request in proposals]
        limits = list(map(len, proposals.values()))
        num_again = None if self._states is None else [plan.num_scheduled_tokens[r.request_id] for r in proposals]
        choice = choose_lengths(acceptances, limits, num_sampling, times, num_again=num_again)
        pays = not self._config.async_scheduling or self._pays(num_sampling, choice)
        chosen = []
        for (request, drafts), length in zip(proposals.items(), choice.lengths, strict=True):
            if length and pays:
                chosen.append((request, drafts[:length]))
            else:
                self._note(request, drafts)
        return chosen

    def _add(self, plan: SchedulerOutput, budget: StepBudget, request: Request, drafts: list[int]) -> int:
        """Plan a request's drafts, as far as there are blocks and attention work for them; returns how many."""
        drafts = drafts[: rows_for_work(request.num_computed_tokens, budget.attention_work)]
        if self._states is not None:
            drafts = drafts[: self._states.draft_room(request)]
        drafts = self._with_blocks(request, plan, drafts)
        if drafts:
            plan.scheduled_spec_decode_tokens[request.request_id] = drafts
            plan.num_scheduled_tokens[request.request_id] += len(drafts)
            budget.take(request.num_computed_tokens, len(drafts))
            request.num_computed_tokens += len(drafts)
            request.num_output_placeholders += len(drafts)
            self._under_way.add(request.request_id)
        return len(drafts)

    def _with_blocks(self, request: Request, plan: SchedulerOutput, drafts: list[int]) -> list[int]:
        """Returns the drafts for which there are blocks, and a slot of a state; takes those that are free."""
        request_id, start = request.request_id, request.num_computed_tokens
        room = self._blocks.num_held_tokens(request_id) - start + self._blocks.num_free_blocks * self._blocks.block_size
        drafts = drafts[:room]
        if drafts and self._states is not None and not self._states.keep_for_drafts(plan, request):
            return []
        if drafts:
            new_block_ids = self._blocks.allocate(request_id, start + len(drafts))
            assert new_block_ids is not None
            if new_block_ids:
                plan.new_block_ids.setdefault(request_id, []).extend(new_block_ids)
        return drafts

    def settle(
        self, plan: SchedulerOutput, model_output: ModelOutput, requests: Mapping[str, Request]
    ) -> dict[str, list[int]]:
        """Take back what rejected drafts took: their rows are computed again, for other tokens.

        Returns the drafts of each request that are accepted, which are no tokens of it yet.
        """
        self._end_step(plan)
        accepted = {}
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            request = requests.get(request_id)
            if request is None:
                continue  # aborted while the step was under way
            num_accepted = model_output.num_accepted_tokens[request_id]
            self._under_way.discard(request_id)
            request.num_output_placeholders -= len(drafts)
            if request.status is RequestStatus.RUNNING:
                self._take_back(plan, request, len(drafts) - num_accepted)
                self._blocks.trim(request_id, request.num_tokens + num_accepted)
            accepted[request_id] = drafts[:num_accepted]
            if request_id not in model_output.late_req_ids and request_id not in model_output.errors:
                before = request.num_draft_tokens
                request.num_draft_tokens = before[0] + len(drafts), before[1] + num_accepted
                self._acceptance.tried(request_id, len(drafts), num_accepted)
                self._proposer.settled(request, len(drafts), num_accepted)
        return accepted

    def _end_step(self, plan: SchedulerOutput) -> None:
        self._times.end()
        if self._config.async_scheduling:
            self._ahead.ended(plan.step_id)
            self._times.start()  # what comes between is hidden where steps are planned ahead, and counts where not

    def _take_back(self, plan: SchedulerOutput, request: Request, num_rejected: int) -> None:
        if self._states is None:
            request.num_computed_tokens -= num_rejected
            return
        if num_rejected:
            request.num_computed_tokens -= plan.num_scheduled_tokens[request.request_id]
        self._states.settle_drafts(request, is_rejected=num_rejected > 0)

    def cancel(self, plan: SchedulerOutput) -> None:
        """A plan will not be run: the drafts in it are void."""
        self._under_way.difference_update(plan.scheduled_spec_decode_tokens)

    def hold_up(self, request_id: str) -> None:
        """Plan a request without drafts the next time: what its grammar has been asked is still to be answered."""
        self._held_up.add(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended."""
        self._under_way.discard(request_id)
        self._held_up.discard(request_id)
        self._noted.pop(request_id, None)
        self._acceptance.forget(request_id)
        self._proposer.forget(request_id)
