"""A request: how it is served, how far it is (:class:`Request`), what came out."""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from metal_engine.lora_adapter import Adapter
from metal_engine.pooling_params import PoolingParams
from metal_engine.sampling_params import NO_RULES, SamplingParams, TokenRules


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How to serve a request, beside what to generate; nothing here changes its output.

    Attributes:
        priority: lower goes first under ``--scheduling-policy priority``; ignored otherwise.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        do_remote_prefill: another engine is computing the prompt's KV: wait for it to arrive from the store.
        do_remote_decode: another engine waits for the prompt's KV: save all of it, prefixes cached here included.
        use_speculation: whether tokens of it may be proposed, where the engine speculates.
        predicted_token_ids: a text that much of its output is expected to be; proposed where the engine speculates.
    """

    priority: int = 0
    cache_salt: str = ""
    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    use_speculation: bool = True
    predicted_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A prompt and its parameters, checked against the model: what the engine takes in. All its outputs share it.

    Attributes:
        prompt_token_ids: the prompt, truncated as ``params`` say.
        params: how to generate.
        max_tokens: tokens to generate at most.
        rules: what ``params`` mean in the model's tokens.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        block_hashes: of the prompt's full blocks, with this salt.
        pooling_params: how to pool the prompt, with nothing left to the checkpoint; None to generate.
        num_lasting_tokens: :attr:`Request.num_lasting_tokens`.
        num_instruction_tokens: :attr:`Request.num_instruction_tokens`.
        adapter: what its rows go through besides the model; None: nothing.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    rules: TokenRules
    cache_salt: str = ""
    block_hashes: list[bytes] = field(default_factory=list)
    pooling_params: PoolingParams | None = None
    num_lasting_tokens: int = 0
    num_instruction_tokens: int = 0
    adapter: Adapter | None = None


class RequestStatus(enum.Enum):
    """Where a request is. PREEMPTED waits like WAITING, ahead of it; WAITING_FOR_REMOTE_KVS cannot be admitted yet."""

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
        """OpenAI's ``finish_reason``, with ``abort`` and ``error`` beside it; None while unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@lru_cache(maxsize=4)  # the outputs of a request share theirs; one has up to a MiB
def _union(eos_token_ids: frozenset[int], stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    return eos_token_ids | frozenset(stop_token_ids)


def client_id(request_id: str) -> str:
    """The id that a request was submitted under. Inside it is another, since clients may use theirs again at
    once, while a step that computes the request they aborted is under way."""
    return request_id.rpartition("#")[0]


@dataclass(eq=False, repr=False, slots=True)
class Request:
    """One sequence under generation: the scheduler's view of it.

    There is no prefill phase and no decode phase: the scheduler hands out some of the difference between
    ``num_tokens + num_output_placeholders`` and ``num_computed_tokens``.

    With ``pooling_params`` it ends with its prompt. Its result stands in for its first token, a placeholder until it
    comes, so ``max_tokens`` is 1.

    Attributes:
        token_ids: prompt, then output, token ids.
        num_computed_tokens: leading tokens whose KV is in the cache, or will be when the steps under way end.
        num_output_placeholders: tokens that steps under way will sample and that are not in ``token_ids`` yet; of a
            request to pool, its result.
        arrival: position in order of arrival; lower is earlier.
        needs_prompt_rows: the prompt's log probabilities are asked for, so each of its tokens has logits.
        num_lasting_tokens: prompt tokens that a later prompt of the conversation begins with, most likely: those
            before the generation prompt. All of them if not given.
        num_instruction_tokens: prompt tokens that other conversations begin with, most likely: those before the
            content of the first user's message. 0 if not known.
        pooling_params: how to pool the prompt, with nothing left to the checkpoint; None to generate.
        adapter: what its rows go through besides the model; None: nothing.
        rules: what ``sampling_params`` mean in the model's tokens.
        seed: of this output's draws.
        block_hashes: of the full blocks of ``token_ids``, as far as they have been computed.
        num_cached_tokens: prompt tokens found in the prefix cache on the first admission; -1 before it.
        num_external_tokens: of the cached tokens, those whose KV came from a store; on the first admission.
        num_registered_blocks: leading blocks that the prefix cache knows by their hashes.
        sort_key: order of service; lower goes first.
        last_step: id of the last step that computed some of it; -1 before the first.
        num_preemptions: how often the request lost its blocks.
        num_draft_tokens: how many tokens were proposed for it, and how many of those were accepted.
        num_predicted_tokens: of the tokens that its client predicted, how many were proposed and accepted, and how many
            proposed and rejected.
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
    block_hashes: list[bytes] = field(default_factory=list)
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

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
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
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every prompt token must be computed, so that cached prefixes are of no use."""
        pooling = self.pooling_params
        return self.needs_prompt_rows or (pooling is not None and pooling.needs_every_token)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def status_after(self, token_id: int) -> RequestStatus | None:
        """How ``token_id``, its last token, ends it; None if it goes on."""
        if token_id in self.stop_token_id_set:
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH if self.num_output_tokens >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, and what else was likely there.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token; tokens as likely share a rank.
        top: (token id, log probability) of the most likely tokens, as many as were asked for, in order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced since the last output of it.

    Attributes:
        request_id: as given on submission.
        text: new text; never half a character, never part of a stop string.
        token_ids: new token ids.
        token_ends: where the text of each token ends, in characters from the beginning of the request's text. A token
            comes once, in order, with the output that shows the end of its text. On the last output come those that
            a stop string has cut off; they end where the text does. The token that stopped generation has no place
            here if it is no part of the text.
        num_prompt_tokens: length of the prompt in tokens.
        num_output_tokens: tokens generated so far, the new ones included.
        num_cached_tokens: prompt tokens whose KV was there: in the prefix cache, or in a store.
        num_external_tokens: of those, the tokens whose KV came from a store.
        num_predicted_tokens: :attr:`Request.num_predicted_tokens` so far, without those that a stop string has cut off.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` on the last output, else None.
        stop_reason: the stop string or stop token id that ended generation, if one did.
        error: message, when ``finish_reason`` is ``error``.
        caused_by_request: whether the error comes of what the request itself asks for.
        logprobs: of each of ``token_ids``; None unless asked for.
        text_logprobs: of the tokens of ``token_ends``, except those whose whole text a stop string has cut off; None
            unless asked for.
        prompt_logprobs: on the first output, of each prompt token, None for the first of them; None unless asked for.
        pooled: of a request to pool, whose only output this is: the vector, or the logits asked for, [D] float32.
    """

    # First what the scheduler knows: it makes one of these for each token.
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
    """Returns consecutive outputs of one request, at least one, as one. An error's comes alone: it has no counts."""
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
