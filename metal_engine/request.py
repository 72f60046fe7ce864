"""Requests: their options, their state in the scheduler (:class:`Request`), and their outputs."""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from metal_engine.lora_adapter import Adapter
from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import PromptImages
from metal_engine.sampling_params import SamplingParams
from metal_engine.token_rules import NO_RULES, TokenRules

if TYPE_CHECKING:
    from metal_engine.text.stop_strings import StopPrefix


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options for serving a request. They do not change its output.

    Attributes:
        priority: lower numbers go first with ``--scheduling-policy priority``; ignored otherwise.
        do_remote_prefill: True if another engine computes the prompt's KV: wait until it arrives from the store.
        do_remote_decode: True if another engine waits for the prompt's KV: save all of it, including cached prefixes.
        use_speculation: False disables drafts for the request. No effect unless the engine speculates.
        predicted_token_ids: expected text of a large part of the output, used for drafts if the engine speculates.
    """

    priority: int = 0
    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    use_speculation: bool = True
    predicted_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """Prompt and parameters, validated for the model. All outputs of a request share it.

    Attributes:
        prompt_token_ids: prompt, truncated according to ``params``.
        params: sampling parameters.
        max_tokens: maximum number of tokens to generate.
        rules: ``params`` resolved for the model's vocabulary.
        eos_token_ids: end-of-sequence ids of the model.
        stop_automaton: automaton of the stop strings; None if there are none.
        cache_salt: requests share cached prefixes only with requests that have the same salt.
        block_hashes: hashes of the prompt's full blocks, with this salt.
        pooling_params: pooling parameters with the model's defaults filled in; None to generate.
        num_lasting_tokens: see :class:`Request`.
        num_instruction_tokens: see :class:`Request`.
        adapter: LoRA adapter of the request; None: no adapter.
        images: images of the prompt; None without images.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    rules: TokenRules
    _: KW_ONLY
    eos_token_ids: frozenset[int] = frozenset()
    stop_automaton: StopPrefix | None = None
    cache_salt: str = ""
    block_hashes: list[bytes] = field(default_factory=list)
    pooling_params: PoolingParams | None = None
    num_lasting_tokens: int = 0
    num_instruction_tokens: int = 0
    adapter: Adapter | None = None
    images: PromptImages | None = None


class RequestStatus(enum.Enum):
    """State of a request. PREEMPTED requests wait in the same queue as WAITING requests.

    A request in state WAITING_FOR_REMOTE_KVS cannot be admitted yet.
    """

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's ``finish_reason``, or ``abort`` or ``error``; None while the request is unfinished."""
        return _FINISH_REASONS.get(self)

    @staticmethod
    def of(finish_reason: str) -> RequestStatus:
        """Return the final status with this ``finish_reason``. Raises KeyError for any other text."""
        return _FINAL_STATUSES[finish_reason]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}
_FINAL_STATUSES = {reason: status for status, reason in _FINISH_REASONS.items()}


# Number of failed steps since a request's last token after which the request fails.
MAX_FAILURES = 3


@lru_cache(maxsize=4)  # the outputs of a request share the set, which may take a MiB
def _union(eos_token_ids: frozenset[int], stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    return eos_token_ids | frozenset(stop_token_ids)


def client_id(request_id: str) -> str:
    """Return the client's id of a request, given the request's id in the engine: ``"a#7"`` -> ``"a"``.

    The ids differ: a client may reuse an id at once, while a step in flight computes the aborted request.
    """
    return request_id.rpartition("#")[0]


@dataclass(eq=False, repr=False, slots=True)
class Request:
    """State of one sequence in the scheduler.

    There are no separate prefill and decode phases: the scheduler allots tokens from the difference between
    ``num_tokens + num_output_placeholders`` and ``num_computed_tokens``.

    A request with ``pooling_params`` ends with its prompt. Its result takes the place of the first output token,
    including the placeholder while it is computed. Its ``max_tokens`` is therefore 1.

    Args:
        so_far: output that an earlier run of the request generated before it was interrupted. The request continues
            after this output, as after preemption.

    Attributes:
        token_ids: token ids of the prompt, followed by the output.
        num_computed_tokens: number of leading tokens with KV in the cache after the steps in flight.
        num_output_placeholders: number of tokens that steps in flight sample and that are not in ``token_ids`` yet. For
            a pooling request, 1 while its result is computed.
        arrival: position in order of arrival; lower is earlier.
        needs_prompt_rows: True if log probabilities of the prompt are requested, so that each of its tokens has logits.
        num_lasting_tokens: number of prompt tokens that the next prompt of the conversation probably starts with: the
            tokens before the generation prompt. Default: all tokens.
        num_instruction_tokens: number of prompt tokens that other conversations probably start with: the tokens before
            the content of the first user message. 0 if unknown.
        pooling_params: pooling parameters with the model's defaults filled in; None to generate.
        adapter: LoRA adapter of the request; None: no adapter.
        images: images of the prompt; None without images.
        rules: ``sampling_params`` resolved for the model's vocabulary.
        seed: seed of this output's random draws.
        cache_salt: requests share cached prefixes only with requests that have the same salt.
        block_hashes: hashes of the full blocks of ``token_ids``, with this salt, as far as they have been computed.
        num_cached_tokens: number of prompt tokens found in the prefix cache or in a store at the first admission. -1
            before the first admission.
        num_external_tokens: number of cached tokens whose KV came from a store.
        num_registered_blocks: number of leading blocks that are registered in the prefix cache.
        sort_key: (priority, arrival). Requests with lower keys are served first.
        last_step: id of the last step that computed tokens of the request; -1 before the first step.
        num_preemptions: number of times that the request was preempted.
        num_failures: number of failed steps that computed the request since its last token.
        num_draft_tokens: (number of proposed drafts, number of accepted drafts).
        num_predicted_tokens: (number of accepted drafts, number of rejected drafts) from the client's predicted text.
        is_constrained: True if the next token has to match a grammar. Initially also True for a request with a grammar
            and ``so_far``, because the phase of its output is unknown until the first step.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling_params: SamplingParams
    _: KW_ONLY
    max_tokens: int
    rules: TokenRules = NO_RULES
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    options: RequestOptions = RequestOptions()
    needs_prompt_rows: bool = False
    num_lasting_tokens: int = 0
    num_instruction_tokens: int = 0
    pooling_params: PoolingParams | None = None
    adapter: Adapter | None = None
    images: PromptImages | None = None
    cache_salt: str = ""
    block_hashes: list[bytes] = field(default_factory=list)
    so_far: InitVar[RequestOutput | None] = None
    num_failures: int = 0
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    stop_token_id_set: frozenset[int] = field(init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_output_placeholders: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    arrival: int = field(default=-1, init=False)
    num_cached_tokens: int = field(default=-1, init=False)
    num_external_tokens: int = field(default=0, init=False)
    num_registered_blocks: int = field(default=0, init=False)
    sort_key: tuple[int, int] = field(default=(0, -1), init=False)
    last_step: int = field(default=-1, init=False)
    num_draft_tokens: tuple[int, int] = field(default=(0, 0), init=False)
    num_predicted_tokens: tuple[int, int] = field(default=(0, 0), init=False)
    is_constrained: bool = field(init=False)

    def __post_init__(self, prompt_token_ids: list[int], so_far: RequestOutput | None) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.is_constrained = self.rules.grammar is not None and not self.rules.grammar.begins_free
        if so_far is not None:
            self.token_ids += so_far.token_ids
            self.num_cached_tokens, self.num_external_tokens = so_far.num_cached_tokens, so_far.num_external_tokens
            self.num_predicted_tokens = so_far.num_predicted_tokens
            # Unknown until the first step has replayed the output. A mask that is not needed does no harm.
            self.is_constrained = self.rules.grammar is not None
        self.num_lasting_tokens = self.num_lasting_tokens or self.num_prompt_tokens
        if self.sampling_params.ignore_eos:
            self.eos_token_ids = frozenset()
        self.stop_token_id_set = _union(self.eos_token_ids, self.sampling_params.stop_token_ids)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, {self.num_prompt_tokens}+"
            f"{self.num_output_tokens} tokens, {self.num_computed_tokens} computed)"
        )

    @property
    def needs_token_on_host(self) -> bool:
        """True if sampling the next token requires the previous token on the host."""
        return self.is_constrained or self.sampling_params.needs_token_on_host

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True if every prompt token must be computed, so that cached prefixes cannot be used."""
        pooling = self.pooling_params
        return self.needs_prompt_rows or (pooling is not None and pooling.needs_every_token)

    @property
    def is_suspect(self) -> bool:
        """True if the request may be the cause of failed steps: two steps have failed since its last token."""
        return self.num_failures > 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def status_after(self, token_id: int) -> RequestStatus | None:
        """Return the final status if ``token_id``, the request's last token, ends it; None if it continues."""
        if token_id in self.stop_token_id_set:
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if self.num_output_tokens >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token, and the most likely alternatives.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token. Equally likely tokens have the same rank.
        top: (token id, log probability) of the requested number of most likely tokens, in order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RequestOutput:
    """Results of a request since its previous output.

    The engine leaves out the text and the counts of prompt and output tokens: ``text``, ``token_ends``,
    ``text_logprobs``, ``num_prompt_tokens`` (except for a pooling request) and ``num_output_tokens``. The client
    (:class:`metal_engine.engine.engine_client.EngineClient`) fills them in.

    Attributes:
        request_id: id given at submission.
        text: new text. Never ends within a character, and never contains a part of a stop string.
        token_ids: new token ids.
        token_ends: end of the text of each token, in characters from the start of the request's text. Tokens are listed
            once, in order, when their text is complete. The last output also lists the tokens that a stop string has
            cut off, with the end of the text. The token that stopped generation is listed only if its text is in the
            output.
        num_prompt_tokens: length of the prompt in tokens.
        num_output_tokens: number of tokens generated so far, including the new tokens.
        num_cached_tokens: number of prompt tokens whose KV was in the prefix cache or in a store.
        num_external_tokens: number of cached tokens whose KV came from a store.
        num_predicted_tokens: :attr:`Request.num_predicted_tokens` so far, without tokens that a stop string has cut
            off.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` in the last output, otherwise None.
        stop_reason: stop string or stop token id that ended generation; None without one.
        error: error message if ``finish_reason`` is ``error``, or if the server aborted the request; otherwise None.
        caused_by_request: True if the request's own parameters caused the error.
        logprobs: log probabilities of ``token_ids``; None unless requested.
        text_logprobs: log probabilities of the tokens in ``token_ends``, except tokens whose whole text a stop string
            has cut off; None unless requested.
        prompt_logprobs: log probabilities of each prompt token, in the first output only. The entry of the first prompt
            token is None. The list is None unless requested.
        pooled: result of a pooling request, in its only output: the vector or the requested logits, [D] float32.
    """

    # The scheduler passes the first five fields by position, because it creates one output for each token.
    request_id: str
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_predicted_tokens: tuple[int, int] = (0, 0)
    text: str = ""
    token_ends: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    caused_by_request: bool = False
    logprobs: list[TokenLogprobs] | None = None
    text_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: np.ndarray | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """Merge consecutive outputs of one request, at least one.

    If the last output has an error, return it alone, without the text and tokens of the earlier outputs.
    """
    first, last = outputs[0], outputs[-1]
    if last is first or last.error is not None:
        return last

    def joined(name: str) -> list[Any]:
        return [item for output in outputs for item in getattr(output, name) or ()]

    return replace(
        last,
        text="".join(output.text for output in outputs),
        token_ids=joined("token_ids"),
        token_ends=joined("token_ends"),
        logprobs=None if first.logprobs is None else joined("logprobs"),
        text_logprobs=None if first.text_logprobs is None else joined("text_logprobs"),
        prompt_logprobs=first.prompt_logprobs,
    )
