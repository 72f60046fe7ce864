"""A request: what was asked (:class:`SamplingParams`), how far it is (:class:`Request`), what came out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

# Far beyond any use; what a request may cost in memory beside its tokens.
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_TOKEN_IDS = 16_384


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate. Names and meanings are vLLM's.

    Raises:
        ValueError: a value is out of range; the message names the parameter.
    """

    max_tokens: int | None = 16
    """Tokens to generate at most; ``None`` means until ``max_model_len``."""
    temperature: float = 1.0
    """0 is greedy. Logits are divided by this before anything else."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one; 0 keeps all."""
    seed: int | None = None
    """Same seed, same prompt, same parameters: same draws, whatever else runs in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end generation; the text is cut before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")
        if any(not s for s in self.stop):
            raise ValueError("stop cannot contain an empty string")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop strings may have {MAX_STOP_CHARACTERS} characters together")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} entries")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_token_on_host(self) -> bool:
        """Whether a token can be sampled only once the one before it is known on the host.

        Such a request is not planned one step ahead: it waits for its token, and others go on.
        """
        return False


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How to serve a request, beside what to generate; nothing here changes its output.

    Attributes:
        priority: lower goes first under ``--scheduling-policy priority``; ignored otherwise.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        do_remote_prefill: another engine is computing the prompt's KV: wait for it to arrive from the store.
        do_remote_decode: another engine waits for the prompt's KV: save all of it, prefixes cached here included.
    """

    priority: int = 0
    cache_salt: str = ""
    do_remote_prefill: bool = False
    do_remote_decode: bool = False


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
    def is_finished(self) -> bool:
        return self in _FINISH_REASONS

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


class Request:
    """One sequence under generation: the scheduler's view of it.

    There is no prefill phase and no decode phase: the scheduler hands out some of the difference between
    ``num_tokens`` (with placeholders) and ``num_computed_tokens``.

    Attributes:
        token_ids: prompt, then output, token ids.
        num_computed_tokens: leading tokens whose KV is in the cache, or will be when the steps under way end.
        num_output_placeholders: tokens that steps under way will sample and that are not in ``token_ids`` yet.
        arrival: position in order of arrival; lower is earlier.
        needs_prompt_rows: every prompt token must be computed, so the prefix cache cannot help.
        block_hashes: of the full blocks of ``token_ids``, as far as they have been computed.
        num_cached_tokens: prompt tokens found in the prefix cache on the first admission; -1 before it.
        num_external_tokens: of the cached tokens, those whose KV came from a store; on the first admission.
        num_registered_blocks: leading blocks that the prefix cache knows by their hashes.
        sort_key: order of service; lower goes first.
        last_step: id of the last step that computed some of it; -1 before the first.
        num_preemptions: how often the request lost its blocks.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "eos_token_ids",
        "last_step",
        "max_tokens",
        "needs_prompt_rows",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "options",
        "request_id",
        "sampling_params",
        "sort_key",
        "status",
        "stop_token_id_set",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        options: RequestOptions | None = None,
        needs_prompt_rows: bool = False,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.eos_token_ids = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_id_set = self.eos_token_ids | frozenset(sampling_params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.arrival = -1
        self.options = options or RequestOptions()
        self.needs_prompt_rows = needs_prompt_rows
        self.block_hashes: list[bytes] = []
        self.num_cached_tokens = -1
        self.num_external_tokens = 0
        self.num_registered_blocks = 0
        self.sort_key = (0, -1)
        self.last_step = -1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, {self.num_prompt_tokens}+"
            f"{self.num_output_tokens} tokens, {self.num_computed_tokens} computed)"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_with_placeholders(self) -> int:
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced since the last output of it.

    Attributes:
        request_id: as given on submission.
        text: new text; never half a character, never part of a stop string.
        token_ids: new token ids.
        num_prompt_tokens: length of the prompt in tokens.
        num_output_tokens: tokens generated so far, the new ones included.
        num_cached_tokens: prompt tokens whose KV was there: in the prefix cache, or in a store.
        num_external_tokens: of those, the tokens whose KV came from a store.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` on the last output, else None.
        stop_reason: the stop string or stop token id that ended generation, if one did.
        error: message, when ``finish_reason`` is ``error``.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
