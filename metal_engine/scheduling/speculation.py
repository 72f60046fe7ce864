"""Drafts: tokens that a request is likely to generate, computed in one step with its last known token.

A request with k drafts has 1 + k rows in a step, and samples at each of them. The first draft that is not what was
sampled before it is rejected with all after it. Drafts take what running requests and prompts have left of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.draft_lengths import Acceptance, StepTimes, best_lengths, least_gain
from metal_engine.scheduling.draft_model import DraftCosts, DraftModelProposer
from metal_engine.scheduling.limits import StepBudget, attention_work, rows_for_work
from metal_engine.scheduling.ngram import NgramProposer
from metal_engine.settings.config import SchedulerConfig, SpeculativeConfig
from metal_engine.step import UNKNOWN_DRAFT, ModelOutput, SchedulerOutput

# Requests of a step whose drafts would not pay, and that have one noted only to be compared with what comes. To find
# drafts takes the host some microseconds.
_MAX_NOTED = 4


class Proposer(Protocol):
    """Where drafts come from."""

    def begin_step(self) -> None:
        """Called before the proposals of a step."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Returns what may follow the request's tokens, ``num_tokens`` tokens at most.

        Tokens may be :data:`UNKNOWN_DRAFT`, all of them then: a draft model fills them in.
        """

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Called when the first ``num_drafts`` tokens of the last proposal have been tried."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; it has ended."""


def make_proposer(config: SpeculativeConfig) -> Proposer:
    """The proposer that a configuration asks for."""
    return DraftModelProposer(config) if config.method == "draft_model" else NgramProposer(config)


class Speculation:
    """Adds drafts to plans, as many as pay, and takes back what they took when they are rejected.

    Args:
        config: how many drafts a request and a step may have.
        blocks: the pool; drafts take blocks that are free, and nobody is preempted for them.
        proposer: where drafts come from.
        times: how long steps take; measured from now on if not given.
        costs: of the draft model, if there is one; likewise.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        proposer: Proposer,
        times: StepTimes | None = None,
        costs: DraftCosts | None = None,
    ) -> None:
        assert config.speculative is not None
        self._num_drafts = config.speculative.num_speculative_tokens
        self._max_draft_len = config.speculative.max_draft_len
        self._max_sample_rows = config.max_sample_rows
        self._blocks = blocks
        self._proposer = proposer
        self._times = times if times is not None else StepTimes()
        self._acceptance = Acceptance()
        self._costs = costs
        if costs is None and config.speculative.method == "draft_model":
            self._costs = DraftCosts()
        self._least_gain = math.inf  # of the last step with requests that decode
        self._is_try = False  # whether the drafts of the step under way are not expected to pay
        self._held_up: set[str] = set()
        self._noted: dict[str, tuple[int, int]] = {}  # request id -> index of a token, and a draft of it
        self._turn = 0

    def add_drafts(self, plan: SchedulerOutput, budget: StepBudget, running: Mapping[str, Request]) -> None:
        """Give the requests that sample in a plan drafts, out of what is left of its budget."""
        self._times.start()
        self._is_try = False
        self._proposer.begin_step()
        # The end of a prompt is a chunk among chunks, and has no drafts.
        decoding = [running[r] for r in plan.sampled_req_ids if plan.num_scheduled_tokens[r] == 1]
        most = min(budget.tokens, self._max_sample_rows - len(plan.sampled_req_ids))
        times = self._times.times(len(decoding), most) if decoding and most > 0 and budget.attention_work > 0 else []
        proposals, others = self._propose(decoding, times)
        num_rows = len(decoding)
        for request, drafts in self._chosen(proposals, num_rows, times):
            num_rows += self._add(plan, budget, request, drafts)
        self._note_some(others)
        if self._costs is not None:
            if times and num_rows == len(decoding):
                num_rows += self._try_one(plan, budget, others, self._costs)
            self._have_prompts_followed(plan, running)
        if len(decoding) == len(plan.num_scheduled_tokens):
            self._times.planned(num_rows)

    @property
    def _draft_seconds(self) -> float:
        return 0.0 if self._costs is None else self._costs.forward_seconds

    def _propose(self, decoding: list[Request], times: list[float]) -> tuple[dict[Request, list[int]], list[Request]]:
        """Returns the drafts of the requests whose drafts are likely enough to pay, as many as fit into the step.

        With them come other requests, whose drafts are not.
        """
        least = least_gain(len(decoding), times, self._draft_seconds)
        if times and (self._costs is None or self._costs.are_known):
            self._least_gain = least
        proposals: dict[Request, list[int]] = {}
        others = []
        room = len(times) - 1
        most = len(decoding) if self._costs is None or self._costs.are_known else 1
        for request in decoding:
            if not self._may_have_drafts(request):
                continue
            self._compare(request)
            if room <= 0 or len(proposals) == most or self._acceptance.of(request.request_id) < least:
                others.append(request)
            elif drafts := self._drafts(request, self._most(request)):
                proposals[request] = drafts
                room -= len(drafts)
        return proposals, others

    def _note_some(self, others: list[Request]) -> None:
        """Note the next draft of some requests, where it is known, to see whether it comes."""
        for i in range(min(_MAX_NOTED, len(others))):
            request = others[(self._turn + i) % len(others)]
            self._note(request, self._drafts(request, 1))
        self._turn += _MAX_NOTED

    def _try_one(self, plan: SchedulerOutput, budget: StepBudget, others: list[Request], costs: DraftCosts) -> int:
        """Have the draft model say one draft of one request, to see whether it comes; returns how many there are."""
        if not others:
            return 0
        request = others[self._turn // _MAX_NOTED % len(others)]
        drafts = self._drafts(request, 1)
        if drafts != [UNKNOWN_DRAFT] or not costs.may_try(request):
            return 0
        num_drafts = self._add(plan, budget, request, drafts)
        self._is_try = num_drafts > 0
        return num_drafts

    def _have_prompts_followed(self, plan: SchedulerOutput, running: Mapping[str, Request]) -> None:
        """Have the draft model compute the prompts of a plan, too, where drafts are likely to pay later."""
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = running[request_id]
            is_prompt = request_id not in plan.scheduled_spec_decode_tokens and num_tokens > 1
            may_have_drafts = request.options.use_speculation and request.pooling_params is None
            if is_prompt and may_have_drafts and self._acceptance.of(request_id) >= self._least_gain:
                plan.draft_model_req_ids.append(request_id)

    def _may_have_drafts(self, request: Request) -> bool:
        if request.request_id in self._held_up:
            self._held_up.remove(request.request_id)
            return False
        return request.options.use_speculation and self._most(request) > 0

    def _most(self, request: Request) -> int:
        # The last token that it may generate needs no draft: it is sampled after the one before it.
        most = min(self._num_drafts, request.max_tokens - request.num_output_tokens - 1)
        return most if self._max_draft_len is None else min(most, self._max_draft_len - request.num_tokens)

    def _drafts(self, request: Request, most: int) -> list[int]:
        drafts = self._proposer.propose(request, most)
        # A token that would end the request can be sampled, but nothing comes after it.
        end = next((i for i, token_id in enumerate(drafts) if token_id in request.stop_token_id_set), len(drafts))
        return drafts[:end]

    def _note(self, request: Request, drafts: list[int]) -> None:
        if drafts and drafts[0] != UNKNOWN_DRAFT:
            self._noted[request.request_id] = request.num_tokens, drafts[0]

    def _compare(self, request: Request) -> None:
        """See whether a draft that was only noted has come."""
        index, draft = self._noted.pop(request.request_id, (request.num_tokens, -1))
        if index < request.num_tokens:
            self._acceptance.tried(request.request_id, 1, int(request.token_ids[index] == draft))

    def _chosen(
        self, proposals: dict[Request, list[int]], num_sampling: int, times: list[float]
    ) -> list[tuple[Request, list[int]]]:
        """Returns of each request's drafts the first, as many as pay."""
        if not proposals:
            return []
        acceptances = [self._acceptance.of(request.request_id) for request in proposals]
        lengths = best_lengths(
            acceptances, list(map(len, proposals.values())), num_sampling, times, self._draft_seconds
        )
        chosen = []
        for (request, drafts), length in zip(proposals.items(), lengths, strict=True):
            if length:
                chosen.append((request, drafts[:length]))
            else:
                self._note(request, drafts)
        return chosen

    def _add(self, plan: SchedulerOutput, budget: StepBudget, request: Request, drafts: list[int]) -> int:
        """Plan a request's drafts, as far as there are blocks and attention work for them; returns how many."""
        drafts = drafts[: rows_for_work(request.num_computed_tokens, budget.attention_work)]
        drafts = self._with_blocks(request, plan, drafts)
        if drafts:
            plan.scheduled_spec_decode_tokens[request.request_id] = drafts
            plan.num_scheduled_tokens[request.request_id] += len(drafts)
            budget.tokens -= len(drafts)
            budget.attention_work -= attention_work(request.num_computed_tokens, len(drafts))
            request.num_computed_tokens += len(drafts)
            request.num_output_placeholders += len(drafts)
        return len(drafts)

    def _with_blocks(self, request: Request, plan: SchedulerOutput, drafts: list[int]) -> list[int]:
        """Returns the drafts for which there are blocks, and takes those that are free."""
        request_id, start = request.request_id, request.num_computed_tokens
        room = self._blocks.num_held_tokens(request_id) - start + self._blocks.num_free_blocks * self._blocks.block_size
        drafts = drafts[:room]
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
        drafting = model_output.drafting
        if drafting is not None and any(
            len(drafts) < len(plan.scheduled_spec_decode_tokens[r]) for r, drafts in drafting.token_ids.items()
        ):
            self._times.planned(0)  # it had fewer rows
        seconds = self._times.end(0.0 if drafting is None else drafting.seconds)
        if self._costs is not None:
            self._costs.measured(seconds, drafting, requests, is_try=self._is_try)
        accepted = {}
        for request_id, planned in plan.scheduled_spec_decode_tokens.items():
            request = requests.get(request_id)
            if request is None:
                continue  # aborted while the step was under way
            drafts = model_output.drafts_of(plan, request_id)
            num_accepted = model_output.num_accepted_tokens[request_id]
            request.num_output_placeholders -= len(planned)
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens -= len(planned) - num_accepted
                self._blocks.trim(request_id, request.num_tokens + num_accepted)
            accepted[request_id] = drafts[:num_accepted]
            if request_id not in model_output.late_req_ids and request_id not in model_output.errors:
                before = request.num_draft_tokens
                request.num_draft_tokens = before[0] + len(drafts), before[1] + num_accepted
                self._acceptance.tried(request_id, len(drafts), num_accepted)
                self._proposer.settled(request, len(drafts), num_accepted)
        return accepted

    def hold_up(self, request_id: str) -> None:
        """Plan a request without drafts the next time: what its grammar has been asked is still to be answered."""
        self._held_up.add(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended."""
        self._held_up.discard(request_id)
        self._noted.pop(request_id, None)
        self._acceptance.forget(request_id)
        if self._costs is not None:
            self._costs.forget(request_id)
        self._proposer.forget(request_id)
