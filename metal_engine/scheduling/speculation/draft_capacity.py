"""Limits on the number of drafts: attention work, blocks of the pool, and slots for recurrent states."""

from __future__ import annotations

from metal_engine.request import Request
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.recurrent_states import RecurrentStates
from metal_engine.scheduling.token_allotment import attention_work, rows_for_work


def max_drafts(request: Request, num_computed: int, work: int, num_tokens: int, states: RecurrentStates | None) -> int:
    """Return how many drafts may follow a running request's first ``num_computed`` tokens.

    Args:
        num_computed: number of the request's tokens that are computed or planned, without the drafts.
        work: attention work left in the step (:func:`metal_engine.scheduling.token_allotment.attention_work`).
        num_tokens: maximum length of the request, in tokens, if it gets all free blocks in addition to its own.
        states: recurrent states; None for models without recurrent layers.
    """
    limit = min(num_tokens - num_computed, rows_for_work(num_computed, work))
    return limit if states is None else min(limit, states.max_drafts(request, num_computed))


class DraftCapacity:
    """Capacity for drafts in a future step that computes the next token of each given request.

    Nothing is allocated: the capacity is only counted.

    Args:
        requests: running requests with one token left to compute. The step in flight may still be sampling this token.
        work: maximum attention work of a step.
        blocks: block pool.
        states: recurrent states; None for models without recurrent layers.
    """

    def __init__(
        self, requests: list[Request], work: int, blocks: BlockManager, states: RecurrentStates | None
    ) -> None:
        self._blocks, self._states = blocks, states
        self._num_spare = 0 if states is None else states.num_spare
        self._work, self._num_free_blocks = work, blocks.num_free_blocks
        for request in requests:
            self._work -= attention_work(request.num_computed_tokens, 1)
            self._num_free_blocks -= blocks.num_held_tokens(request.request_id) <= request.num_computed_tokens

    def take(self, request: Request, num_drafts: int) -> int:
        """Reserve capacity for up to ``num_drafts`` drafts of a request. Return the number of drafts that fit."""
        if self._states is not None and not self._states.may_keep_for_drafts(request, self._num_spare):
            return 0
        start, block_size = request.num_computed_tokens + 1, self._blocks.block_size
        held = max(self._blocks.num_held_tokens(request.request_id), self._blocks.blocks_for(start) * block_size)
        num_tokens = held + self._num_free_blocks * block_size
        num_taken = max(0, min(num_drafts, max_drafts(request, start, self._work, num_tokens, self._states)))
        if num_taken:
            self._work -= attention_work(start, num_taken)
            self._num_free_blocks -= max(0, self._blocks.blocks_for(start + num_taken) - held // block_size)
            self._num_spare -= 1
        return num_taken
