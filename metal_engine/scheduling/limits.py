"""Limits one request's share of a step: its size is decided here, for running and for waiting requests.

Token budget, even shares, block alignment and the cap on attention work meet in :class:`PrefillAllocator`;
``max_model_len`` is in :func:`num_remaining`, which is all that a decode needs: its share is one token. Which waiting
request may start, beside how many others and how many long ones, is decided in ``scheduler.py`` and ``admission.py``.

``--async-scheduling`` and ``--page-aligned-scheduling`` change who gets what in one place each:
:func:`num_remaining` and :func:`chunk_unit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

from metal_engine.errors import ContextLengthError, PromptError
from metal_engine.request import Request
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.settings.config import SchedulerConfig

# Rows of prompts with log probabilities in a step. With a vocabulary of 262,144 the logits of one row take a megabyte,
# and there are copies of them: so many rows fit well into what a GPU has left for activations.
MAX_PROMPT_ROWS = 256


@dataclass(slots=True)
class StepBudget:
    """What a step has left to hand out.

    Attributes:
        tokens: query rows.
        attention_work: pairs of a query row and a key it sees; decodes may take it below 0.
        prompt_rows: rows of prompts whose log probabilities are wanted. Each has logits of its own, as large as the
            vocabulary.
    """

    tokens: int
    attention_work: int
    prompt_rows: int = MAX_PROMPT_ROWS

    def take(self, context_len: int, num_rows: int) -> None:
        """Hand out ``num_rows`` rows of a request after ``context_len`` tokens."""
        self.tokens -= num_rows
        self.attention_work -= attention_work(context_len, num_rows)


def check_fits(num_prompt_tokens: int, max_tokens: int, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Refuse a request of this size if it could never be served; one to pool has no ``max_tokens`` (0).

    Raises:
        ContextLengthError: it is longer than ``max_model_len``.
        PromptError: the prompt is empty, or the request larger than the KV cache.
    """
    if num_prompt_tokens < 1:
        raise PromptError("the prompt has no tokens")
    total = num_prompt_tokens + max_tokens
    if total > config.max_model_len:
        raise ContextLengthError(
            "max_tokens",
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: {total} tokens "
            f"together, but the maximum context length is {config.max_model_len} tokens",
        )
    # The KV of the last token generated is never needed.
    num_blocks = blocks.blocks_for(max(total - 1, num_prompt_tokens))
    if num_blocks > blocks.num_blocks:
        raise PromptError(
            f"the request needs {num_blocks} KV cache blocks ({num_prompt_tokens} prompt tokens, "
            f"max_tokens {max_tokens}), but the pool has only {blocks.num_blocks}"
        )


def num_remaining(request: Request, config: SchedulerConfig) -> int:
    """Returns how many tokens ``request`` could compute now.

    With ``--async-scheduling``, steps under way may still be sampling tokens of it, its placeholders. These count as
    known tokens; but 0 is returned if they finish the request, or if the next one cannot be sampled without them.
    """
    if request.num_output_placeholders and request.sampling_params.needs_token_on_host:
        return 0
    num_known = len(request.token_ids) + request.num_output_placeholders
    if num_known - request.num_prompt_tokens >= request.max_tokens:
        return 0
    return min(num_known, config.max_model_len) - request.num_computed_tokens


def is_long(num_remaining_tokens: int, config: SchedulerConfig) -> bool:
    """Whether a prompt that has so many tokens left to compute counts as long."""
    return num_remaining_tokens > config.long_prefill_token_threshold


def attention_work(context_len: int, num_rows: int) -> int:
    """Returns how many keys ``num_rows`` rows after ``context_len`` tokens see, all together."""
    return num_rows * context_len + num_rows * (num_rows + 1) // 2


def rows_for_work(context_len: int, work: int) -> int:
    """Returns the most rows after ``context_len`` tokens whose :func:`attention_work` is within ``work``."""
    if work <= 0:
        return 0
    b = 2 * context_len + 1
    return (isqrt(b * b + 8 * work) - b) // 2


def chunk_unit(config: SchedulerConfig, block_size: int) -> int:
    """Tokens that chunks come in: whole blocks with ``--page-aligned-scheduling``, single tokens without it.

    The share of a chunk that is not its prompt's last is a multiple of this, and every chunk is charged by it.
    """
    return block_size if config.page_aligned_scheduling else 1


class PrefillAllocator:
    """Shares out a step's budget for prefills, as decodes left it.

    First every request taken in gets the smallest share: a block, or what is left of its prompt if that is less.
    Then :meth:`spread` deals out the rest evenly; what one cannot use goes to the others.

    Args:
        step: what decodes left; reduced by what is given here.
        prefills: running requests with more than one token left to compute, for :meth:`take_turns`.
        room: how many tokens of a request may follow so many computed ones in one chunk.
        take_at_once: called when a prompt is to be computed at once, for lack of a slot; how many tokens that is.

    Attributes:
        shares: tokens for each request taken in, in the order of their turns.
        num_long: of the requests in progress, those whose prompts were long when they came into this step.
    """

    def __init__(
        self,
        step: StepBudget,
        prefills: list[Request],
        config: SchedulerConfig,
        block_size: int,
        room: Callable[[Request, int], int] = lambda request, num_computed: request.num_tokens,
        take_at_once: Callable[[Request, int], int] = lambda request, num_computed: request.num_tokens,
    ) -> None:
        self.step = step
        self.shares: dict[Request, int] = {}
        self._config = config
        self._block_size = block_size
        self._room = room
        self._take_at_once = take_at_once
        self._unit = chunk_unit(config, block_size)
        self._unfinished: list[Request] = []  # taken in, with shares that do not complete their prompts
        # Running requests without a share in this step; those that have waited longest for one first.
        self._left_out = sorted(prefills, key=lambda r: (r.last_step, r.arrival))
        self.num_long = sum(is_long(num_remaining(r, config), config) for r in prefills)

    def take_turns(self) -> None:
        """Take in the running requests in turn, as many as the budget can give the smallest share."""
        left_out, self._left_out = self._left_out, []
        for request in left_out:
            if self.has_room(request, request.num_computed_tokens, num_remaining(request, self._config)):
                self._take(request)
            else:
                self._left_out.append(request)

    def should_admit_first(self, last_admission: int) -> bool:
        """Whether a waiting request now goes before the running ones, which use up what there is.

        It does once every running prefill has had a share since step ``last_admission``, the last that admitted
        somebody. Without such a turn nobody might ever be admitted to a free slot: where the budget serves one request
        only, or where one block of a long context takes all the attention work of a step.
        """
        return bool(self._left_out) and last_admission < self._left_out[0].last_step

    @property
    def num_partial(self) -> int:
        """Requests whose prompts this step does not complete."""
        return len(self._unfinished) + len(self._left_out)

    @property
    def num_in_progress(self) -> int:
        """Requests that take a slot in this step."""
        return len(self.shares) + len(self._left_out)

    @property
    def in_progress(self) -> list[Request]:
        """Requests whose prefill is under way, those that this step admits included."""
        return [*self.shares, *self._left_out]

    def has_room(self, request: Request, num_computed_tokens: int, num_remaining_tokens: int) -> bool:
        """Returns whether a request can have the smallest share. The first request takes whatever there is."""
        smallest = min(num_remaining_tokens, self._block_size)
        return self.fits(request, num_computed_tokens, smallest) or self._is_first

    def has_some_room(self, request: Request, num_computed_tokens: int, num_remaining_tokens: int) -> bool:
        """Returns whether a request can have any tokens at all, even if they are fewer than the smallest share."""
        some = min(num_remaining_tokens, self._block_size, self.step.tokens)
        return (some > 0 and self.fits(request, num_computed_tokens, some)) or self._is_first

    @property
    def _is_first(self) -> bool:
        return not self.shares and self.step.tokens >= self._unit

    def fits(self, request: Request, num_computed_tokens: int, num_tokens: int) -> bool:
        """Whether a share of so many tokens fits into what is left of this step."""
        return (
            self._charge(num_tokens) <= self.step.tokens
            and not (request.needs_prompt_rows and num_tokens > self.step.prompt_rows)
            and attention_work(num_computed_tokens, num_tokens) <= self.step.attention_work
        )

    def take(self, request: Request, *, whole: bool = False) -> None:
        """Take in a new request, for which :meth:`has_room`, and give it the smallest share.

        With ``whole`` it gets all of its prompt at once, for which :meth:`fits`, or all but the end after its last
        checkpoint: it has no slot, so its prompt must be complete after this step or the next, and an even part of the
        budget might not do.
        """
        self.num_long += is_long(num_remaining(request, self._config), self._config)
        self._take(request, whole)

    def _take(self, request: Request, whole: bool = False) -> None:
        remaining = num_remaining(request, self._config)
        self.shares[request] = 0
        num_computed = request.num_computed_tokens
        if whole:
            share = min(remaining, self._take_at_once(request, num_computed))
        else:
            share = min(remaining, self._block_size, self.step.tokens, self._room(request, num_computed))
        self._give(request, share)
        if self.shares[request] < remaining:
            self._unfinished.append(request)

    def spread(self) -> None:
        """Deal out what is left of the budget, evenly among the requests that can still use some."""
        self._unfinished.sort(key=self._missing)  # those that need least first: what they leave is for the others
        served = self._unfinished
        while served and self.step.tokens:
            in_turn, served = served, []
            for i, request in enumerate(in_turn):
                num_asking = sum(r.needs_prompt_rows for r in in_turn[i:])
                extra = self._extra(request, len(in_turn) - i, num_asking)
                if extra:
                    self._give(request, extra)
                    served.append(request)
            served = [request for request in served if self._missing(request)]
        self._unfinished = [request for request in self._unfinished if self._missing(request)]

    def _missing(self, request: Request) -> int:
        return num_remaining(request, self._config) - self.shares[request]

    def _extra(self, request: Request, num_parts: int, num_asking: int) -> int:
        """Returns how much ``request`` can use of an equal part of what is left.

        Args:
            num_parts: requests that share the tokens and the attention work.
            num_asking: those of them that share the prompt rows.
        """
        missing = self._missing(request)
        room = max(0, self._room(request, request.num_computed_tokens) - self.shares[request])
        context_len = request.num_computed_tokens + self.shares[request]
        extra = min(
            missing,
            room,
            self._aligned(self.step.tokens // num_parts),
            rows_for_work(context_len, self.step.attention_work // num_parts),
        )
        if request.needs_prompt_rows:
            extra = min(extra, self.step.prompt_rows // num_asking)
        return extra if extra in (missing, room) else self._aligned(extra)

    def _give(self, request: Request, num_tokens: int) -> None:
        context_len = request.num_computed_tokens + self.shares[request]
        self.step.attention_work -= attention_work(context_len, num_tokens)
        self.step.tokens -= self._charge(num_tokens)
        if request.needs_prompt_rows:
            self.step.prompt_rows -= num_tokens
        self.shares[request] += num_tokens

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._unit

    def _charge(self, num_tokens: int) -> int:
        return -(-num_tokens // self._unit) * self._unit
