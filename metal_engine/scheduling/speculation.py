"""Drafts: tokens that a request is likely to generate, computed in one step with its last known token.

A request with k drafts has 1 + k rows in a step, and samples at each of them. The first draft that is not what was
sampled before it is rejected with all after it. Drafts take what running requests and prompts have left of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from metal_engine.request import Request, RequestStatus
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.limits import StepBudget, attention_work, rows_for_work
from metal_engine.settings.config import SchedulerConfig
from metal_engine.step import ModelOutput, SchedulerOutput


class Proposer(Protocol):
    """Where drafts come from."""

    def begin_step(self) -> None:
        """Called before the proposals of a step."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Returns what may follow the request's tokens, ``num_tokens`` tokens at most."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; it has ended."""


class Speculation:
    """Adds drafts to plans, and takes back what they took when they are rejected.

    Args:
        config: how many drafts a request and a step may have.
        blocks: the pool; drafts take blocks that are free, and nobody is preempted for them.
        proposer: where drafts come from.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, proposer: Proposer) -> None:
        assert config.speculative is not None
        self._num_drafts = config.speculative.num_speculative_tokens
        self._max_sample_rows = config.max_sample_rows
        self._blocks = blocks
        self._proposer = proposer
        self._held_up: set[str] = set()

    def add_drafts(self, plan: SchedulerOutput, budget: StepBudget, running: Mapping[str, Request]) -> None:
        """Give the requests that sample in a plan drafts, out of what is left of its budget."""
        self._proposer.begin_step()
        num_rows = self._max_sample_rows - len(plan.sampled_req_ids)
        for request_id in plan.sampled_req_ids:
            if min(budget.tokens, budget.attention_work, num_rows) <= 0:
                break
            request = running[request_id]
            drafts = self._drafts(request, plan, min(self._num_drafts, budget.tokens, num_rows), budget)
            if not drafts:
                continue
            plan.scheduled_spec_decode_tokens[request_id] = drafts
            plan.num_scheduled_tokens[request_id] += len(drafts)
            budget.tokens -= len(drafts)
            budget.attention_work -= attention_work(request.num_computed_tokens, len(drafts))
            num_rows -= len(drafts)
            request.num_computed_tokens += len(drafts)
            request.num_output_placeholders += len(drafts)

    def _drafts(self, request: Request, plan: SchedulerOutput, most: int, budget: StepBudget) -> list[int]:
        """Returns a request's drafts, and gives it blocks for them; none where it must do without."""
        request_id = request.request_id
        if plan.num_scheduled_tokens[request_id] != 1 or not request.options.use_speculation:
            return []  # the end of a prompt is a chunk among chunks
        if request_id in self._held_up:
            self._held_up.remove(request_id)
            return []
        # The last token that it may generate needs no draft: it is sampled after the one before it.
        most = min(most, request.max_tokens - request.num_output_tokens - 1)
        most = min(most, rows_for_work(request.num_computed_tokens, budget.attention_work))
        if most <= 0:
            return []
        drafts = self._proposer.propose(request, most)
        # A token that would end the request can be sampled, but nothing comes after it.
        end = next((i for i, token_id in enumerate(drafts) if token_id in request.stop_token_id_set), len(drafts))
        return self._with_blocks(request, plan, drafts[:end])

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

    def settle(self, request: Request, drafts: list[int], model_output: ModelOutput) -> list[int]:
        """Take back what rejected drafts took: their rows are computed again, for other tokens.

        Returns the drafts that are accepted, which are no tokens of the request yet.
        """
        num_accepted = model_output.num_accepted_tokens[request.request_id]
        request.num_output_placeholders -= len(drafts)
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= len(drafts) - num_accepted
            self._blocks.trim(request.request_id, request.num_tokens + num_accepted)
        return drafts[:num_accepted]

    def hold_up(self, request_id: str) -> None:
        """Plan a request without drafts the next time: what its grammar has been asked is still to be answered."""
        self._held_up.add(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended."""
        self._held_up.discard(request_id)
        self._proposer.forget(request_id)
