"""Limits on the token allotment of a request in a step, for running and waiting requests.

:class:`PrefillAllocator` applies the token budget, even allotments, block alignment and the cap on attention work.
:func:`num_remaining` applies ``max_model_len``; decodes need no other limit, because their allotment is one token.
``scheduler.py`` and ``admission.py`` decide which waiting request may start, given the limits on concurrent prefills
and on long prompts.

``--async-scheduling`` changes the allotments only through :func:`num_remaining`, and ``--page-aligned-scheduling`` only
through :func:`chunk_unit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

from metal_engine.errors import ContextLengthError, PromptError
from metal_engine.request import Request
from metal_engine.scheduling.image_planner import last_cut, next_cut
from metal_engine.settings.config import CacheConfig, SchedulerConfig

# Maximum number of prompt rows with log probabilities in a step. With a vocabulary of 262,144 the logits of one row
# take a megabyte, and they are copied. 256 rows fit well into the memory that a GPU has left for activations.
MAX_PROMPT_ROWS = 256


@dataclass(slots=True)
class StepBudget:
    """Remaining budget of a step.

    Attributes:
        tokens: number of query rows.
        attention_work: number of keys that the rows may attend to, summed over the rows. Decodes may make it negative.
        prompt_rows: number of prompt rows with log probabilities. A row has as many logits as the vocabulary has
            tokens.
    """

    tokens: int
    attention_work: int
    prompt_rows: int = MAX_PROMPT_ROWS

    def take(self, context_len: int, num_rows: int) -> None:
        """Subtract the tokens and the attention work of ``num_rows`` rows that follow ``context_len`` tokens."""
        self.tokens -= num_rows
        self.attention_work -= attention_work(context_len, num_rows)


def check_fits(num_prompt_tokens: int, max_tokens: int, config: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise if a request of this size could never be served. ``max_tokens`` is 0 for a pooling request.

    Raises:
        ContextLengthError: the request is longer than ``max_model_len``.
        PromptError: the prompt is empty, or the request is larger than the KV cache.
    """
    if num_prompt_tokens < 1:
        raise PromptError("the prompt has no tokens")
    total = num_prompt_tokens + max_tokens
    if total > config.max_model_len:
        raise ContextLengthError(
            "max_tokens",
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: {total} tokens "
            f"together, but the maximum context length is {config.max_model_len} tokens",
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            limit=config.max_model_len,
        )
    # The KV of the last generated token is never needed.
    num_blocks = -(-max(total - 1, num_prompt_tokens) // cache.block_size)
    if num_blocks > cache.num_blocks:
        raise PromptError(
            f"the request needs {num_blocks} KV cache blocks ({num_prompt_tokens} prompt tokens, "
            f"max_tokens {max_tokens}), but the pool has only {cache.num_blocks}"
        )


def num_remaining(request: Request, config: SchedulerConfig) -> int:
    """Return how many tokens of ``request`` could be computed now.

    With ``--async-scheduling``, steps in flight may still be sampling tokens of the request. These tokens count as
    known, because the device has their values. The result is 0 if they complete the request, or if sampling the next
    token needs their values on the host.
    """
    if request.num_output_placeholders and request.needs_token_on_host:
        return 0
    num_known = len(request.token_ids) + request.num_output_placeholders
    if num_known - request.num_prompt_tokens >= request.max_tokens:
        return 0
    return min(num_known, config.max_model_len) - request.num_computed_tokens


def is_long(num_remaining_tokens: int, config: SchedulerConfig) -> bool:
    """Return True if a prompt with this many tokens left to compute counts as long."""
    return num_remaining_tokens > config.long_prefill_token_threshold


def attention_work(context_len: int, num_rows: int) -> int:
    """Return the total number of keys that ``num_rows`` rows after ``context_len`` tokens attend to."""
    return num_rows * context_len + num_rows * (num_rows + 1) // 2


def rows_for_work(context_len: int, work: int) -> int:
    """Return how many rows after ``context_len`` tokens have an :func:`attention_work` of at most ``work``."""
    if work <= 0:
        return 0
    b = 2 * context_len + 1
    return (isqrt(b * b + 8 * work) - b) // 2


def chunk_unit(config: SchedulerConfig, block_size: int) -> int:
    """Return the unit of chunk sizes: a block with ``--page-aligned-scheduling``, otherwise one token.

    Chunk sizes are multiples of the unit, except for the last chunk of a prompt. All chunks are charged in whole units.
    """
    return block_size if config.page_aligned_scheduling else 1


class PrefillAllocator:
    """Divides the budget that decodes leave in a step among prefills.

    Each added request first gets the minimum allotment: a block, or the remaining prompt if that is shorter. No
    allotment ends within an image whose tokens attend to each other. A minimum allotment that would end there includes
    the whole image. :meth:`spread` then divides the remaining budget evenly, and gives tokens that one request cannot
    use to other requests.

    Args:
        step: budget left by decodes. Allotted tokens are subtracted from it.
        prefills: running requests with more than one token left to compute, for :meth:`add_running`.
        max_chunk_tokens: callback with a request and its number of computed tokens. Returns the maximum number of
            tokens of the next chunk; 0 if the image features for the smallest possible chunk do not fit. May claim
            image features.
        plan_whole_prompt: callback with the same arguments, for a prompt that is planned as a whole because no prefill
            slot is free. Returns how many of the prompt's tokens to compute in this step.

    Attributes:
        allotments: token allotment of each added request, in order of addition.
        num_long: number of requests in progress whose prompts counted as long (:func:`is_long`) at the start of this
            step, or when they were admitted in this step.
    """

    def __init__(
        self,
        step: StepBudget,
        prefills: list[Request],
        config: SchedulerConfig,
        block_size: int,
        max_chunk_tokens: Callable[[Request, int], int] = lambda request, num_computed: request.num_tokens,
        plan_whole_prompt: Callable[[Request, int], int] = lambda request, num_computed: request.num_tokens,
    ) -> None:
        self.step = step
        self.allotments: dict[Request, int] = {}
        self._config = config
        self._block_size = block_size
        self._max_chunk_tokens = max_chunk_tokens
        self._plan_whole_prompt = plan_whole_prompt
        self._unit = chunk_unit(config, block_size)
        self._unfinished: list[Request] = []  # added requests whose allotments do not complete their prompts
        # Running requests without an allotment in this step, the longest waiting first.
        self._left_out = sorted(prefills, key=lambda r: (r.last_step, r.arrival))
        self.num_long = sum(is_long(num_remaining(r, config), config) for r in prefills)

    def add_running(self) -> None:
        """Add the running prefills whose minimum allotment fits, the longest waiting first.

        Prefills whose image features do not fit into the step are left out.
        """
        left_out, self._left_out = self._left_out, []
        for request in left_out:
            num_computed, remaining = request.num_computed_tokens, num_remaining(request, self._config)
            if self._max_chunk_tokens(request, num_computed) and self.fits_minimum(request, num_computed, remaining):
                self._take(request)
            else:
                self._left_out.append(request)

    def should_admit_first(self, last_admission: int) -> bool:
        """Return True if a waiting request is to be admitted before the running prefills use up the budget.

        This is the case once every running prefill has had tokens since step ``last_admission``, the last step that
        admitted a request. Without this rule, running prefills could use up every step, and a free slot would never be
        filled. For example, one block of a long context can take all the attention work of a step. False if there are
        no running prefills.
        """
        return bool(self._left_out) and last_admission < self._left_out[0].last_step

    @property
    def num_partial(self) -> int:
        """Number of requests whose prompts this step does not complete with the allotments so far."""
        return len(self._unfinished) + len(self._left_out)

    @property
    def num_in_progress(self) -> int:
        """Number of prefills that are running or have an allotment in this step."""
        return len(self.allotments) + len(self._left_out)

    @property
    def in_progress(self) -> list[Request]:
        """Requests whose prefill is in progress, including requests admitted in this step."""
        return [*self.allotments, *self._left_out]

    def fits_minimum(self, request: Request, num_computed_tokens: int, num_remaining_tokens: int) -> bool:
        """Return True if the minimum allotment of a request fits.

        The first request of a step also fits if the budget has tokens for the smallest possible chunk: one
        :func:`chunk_unit`, or an image that no chunk may cut. The limits on attention work and prompt rows do not apply
        to it.
        """
        smallest = self._uncut(request, num_computed_tokens, min(num_remaining_tokens, self._block_size))
        return self.fits(request, num_computed_tokens, smallest) or self._is_first(request, num_computed_tokens)

    def fits_any(self, request: Request, num_computed_tokens: int, num_remaining_tokens: int) -> bool:
        """Return True if the request can have any tokens, even fewer than the minimum allotment."""
        some = min(num_remaining_tokens, self._block_size, self.step.tokens)
        some = self._uncut(request, num_computed_tokens, some)
        fits = some > 0 and self.fits(request, num_computed_tokens, some)
        return fits or self._is_first(request, num_computed_tokens)

    def _is_first(self, request: Request, num_computed: int) -> bool:
        return not self.allotments and self.step.tokens >= self._least(request, num_computed)

    def _least(self, request: Request, num_computed: int) -> int:
        """Return the smallest number of tokens after which a chunk may end. A prompt may have fewer tokens left."""
        return next_cut(request.images, num_computed, self._unit) - num_computed

    def _uncut(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """Return the largest allotment up to ``num_tokens`` tokens that cuts no image.

        Return :meth:`_least` if every allotment up to ``num_tokens`` tokens cuts an image.
        """
        if request.images is None or not num_tokens:
            return num_tokens
        allotment = last_cut(request.images, num_computed, num_computed + num_tokens, self._unit) - num_computed
        return allotment or self._least(request, num_computed)

    def fits(self, request: Request, num_computed_tokens: int, num_tokens: int) -> bool:
        """Return True if an allotment of ``num_tokens`` tokens fits into the remaining budget of this step."""
        return (
            self._charge(num_tokens) <= self.step.tokens
            and not (request.needs_prompt_rows and num_tokens > self.step.prompt_rows)
            and attention_work(num_computed_tokens, num_tokens) <= self.step.attention_work
        )

    def take(self, request: Request, *, whole: bool = False) -> None:
        """Add a newly admitted request that passed :meth:`fits_minimum`, with the minimum allotment.

        A request that passed only :meth:`fits_any` may get fewer tokens: the remaining tokens of the budget.

        With ``whole``, the request gets no prefill slot, and its whole remaining prompt must pass :meth:`fits`. The
        allotment is then this prompt, or the part up to its last state checkpoint. A request without a slot must
        complete its prompt within two steps, and an even part of the budget might be too small for this.
        """
        self.num_long += is_long(num_remaining(request, self._config), self._config)
        self._take(request, whole)

    def _take(self, request: Request, whole: bool = False) -> None:
        remaining = num_remaining(request, self._config)
        self.allotments[request] = 0
        num_computed = request.num_computed_tokens
        if whole:
            allotment = min(remaining, self._plan_whole_prompt(request, num_computed))
        else:
            allotment = min(
                remaining, self._block_size, self.step.tokens, self._max_chunk_tokens(request, num_computed)
            )
            allotment = min(remaining, self._uncut(request, num_computed, allotment))
        self._give(request, allotment)
        if self.allotments[request] < remaining:
            self._unfinished.append(request)

    def spread(self) -> None:
        """Divide the remaining budget evenly among the requests that can use more tokens."""
        self._unfinished.sort(key=self._missing)  # smallest need first, so that later requests get the unused tokens
        served = self._unfinished
        while served and self.step.tokens:
            candidates, served = served, []
            for i, request in enumerate(candidates):
                num_asking = sum(r.needs_prompt_rows for r in candidates[i:])
                extra = self._extra(request, len(candidates) - i, num_asking)
                if extra:
                    self._give(request, extra)
                    served.append(request)
            served = [request for request in served if self._missing(request)]
        self._unfinished = [request for request in self._unfinished if self._missing(request)]

    def _missing(self, request: Request) -> int:
        return num_remaining(request, self._config) - self.allotments[request]

    def _extra(self, request: Request, num_parts: int, num_asking: int) -> int:
        """Return how many tokens ``request`` can use of an equal part of the remaining budget.

        If no chunk may cut the request's next image, the result can exceed the part: it is then the whole image.

        Args:
            num_parts: number of requests that share the tokens and the attention work.
            num_asking: number of these requests that also share the prompt rows.
        """
        missing = self._missing(request)
        chunk_left = max(0, self._max_chunk_tokens(request, request.num_computed_tokens) - self.allotments[request])
        context_len = request.num_computed_tokens + self.allotments[request]
        extra = min(
            missing,
            chunk_left,
            self._aligned(self.step.tokens // num_parts),
            rows_for_work(context_len, self.step.attention_work // num_parts),
        )
        if request.needs_prompt_rows:
            extra = min(extra, self.step.prompt_rows // num_asking)
        if extra not in (missing, chunk_left):
            extra = self._aligned(extra)
        if request.images is None:
            return extra
        uncut = last_cut(request.images, context_len, context_len + extra, self._unit) - context_len
        least = self._least(request, context_len)
        if uncut or least == self._unit:
            return uncut
        # The next image may exceed an equal part.
        least = min(missing, least)
        has_room = self._charge(least) <= self.step.tokens and least <= chunk_left
        return least if has_room and least <= rows_for_work(context_len, self.step.attention_work) else 0

    def _give(self, request: Request, num_tokens: int) -> None:
        context_len = request.num_computed_tokens + self.allotments[request]
        self.step.attention_work -= attention_work(context_len, num_tokens)
        self.step.tokens -= self._charge(num_tokens)
        if request.needs_prompt_rows:
            self.step.prompt_rows -= num_tokens
        self.allotments[request] += num_tokens

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._unit

    def _charge(self, num_tokens: int) -> int:
        return -(-num_tokens // self._unit) * self._unit
