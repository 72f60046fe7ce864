"""Data classes that the scheduler, runner and engine exchange for one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import PromptImages
from metal_engine.request import Request, TokenLogprobs
from metal_engine.sampling_params import SamplingParams
from metal_engine.token_rules import NO_RULES, TokenRules

# Placeholder for a draft that the runner's draft model or draft head fills in.
UNKNOWN_DRAFT = -1
# Number of a request's tokens that are new to the draft model in each drafting step: the last token, and the last draft
# if all drafts were accepted.
NEW_TO_DRAFT_MODEL = 2


@dataclass(slots=True)
class NewRequestData:
    """Complete data of a request that the runner does not hold: a new request, or a request that it has dropped.

    Attributes:
        token_ids: all known tokens: the prompt, followed by the output if the request resumes after preemption.
        block_ids: complete block table of the request.
        rules: ``sampling_params`` resolved for the model's vocabulary.
        seed: seed of the request's random draws.
        pooling_params: pooling parameters; None to generate.
        state_slots: slots of the initial recurrent state (0: zero state) and of the state that the first step writes.
        adapter_slot: slot of the request's LoRA adapter; 0: no adapter.
        stop_token_ids: tokens that end the request. No drafts follow them.
        images: images of the prompt; None without images.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    rules: TokenRules = NO_RULES
    seed: int = 0
    pooling_params: PoolingParams | None = None
    state_slots: tuple[int, int] = (0, 0)
    adapter_slot: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    images: PromptImages | None = None

    @staticmethod
    def of(request: Request, block_ids: list[int], state_slots: tuple[int, int] = (0, 0)) -> NewRequestData:
        return NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=request.sampling_params,
            rules=request.rules,
            seed=request.seed,
            pooling_params=request.pooling_params,
            state_slots=state_slots,
            adapter_slot=0 if request.adapter is None else request.adapter.slot,
            stop_token_ids=request.stop_token_id_set,
            images=request.images,
        )


@dataclass(frozen=True, slots=True)
class ImageToEncode:
    """Image whose features a step computes: its content hash, number of features, and the inputs of the encoder."""

    content_hash: bytes
    num_features: int
    inputs: Mapping[str, np.ndarray] = field(repr=False)


@dataclass(slots=True)
class KVConnectorMetadata:
    """Blocks and recurrent states that a step moves between the KV cache and a store.

    Attributes:
        loads: block id -> contents, uint8 [bytes of a block], written before the forward.
        saves: (hash, block id) of blocks that are complete when the step has ended.
        state_loads: slot -> recurrent state, uint8 [bytes of a state], written before the forward.
        state_saves: (hash of the prefix's last block, slot) of states that are complete when the step has ended.
    """

    loads: dict[int, np.ndarray] = field(default_factory=dict)
    saves: list[tuple[bytes, int]] = field(default_factory=list)
    state_loads: dict[int, np.ndarray] = field(default_factory=dict)
    state_saves: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """Plan of one step: how many tokens of each request to compute.

    Attributes:
        step_id: number of the step, from 0.
        num_scheduled_tokens: request id -> query length, in packing order. The query length of a decode is 1, or 1 + k
            with k drafts.
        new_requests: requests in this step that the runner does not hold.
        new_block_ids: request id -> blocks appended to the block table. For a request in ``new_requests``, further
            blocks for its drafts.
        new_state_slots: request id -> new slot for the recurrent state. The request writes to this slot from this step
            on. The step still reads the initial state from the previous slot. For a request in ``new_requests``, the
            slot replaces the second of its ``state_slots``.
        sampled_req_ids: requests that sample their next token, because their last known token is in this step; in
            packing order. Excludes intermediate chunks and pooling requests.
        pooled_req_ids: pooling requests whose prompts this step completes, in packing order.
        scheduled_spec_decode_tokens: request id -> drafts, which are computed as if they followed the request's last
            known token. That token is also in this step. The request samples after the last known token and after each
            draft. If all drafts of a request are :data:`UNKNOWN_DRAFT`, the draft model or the draft head fills them
            in, and may return fewer drafts.
        draft_model_req_ids: requests whose tokens in this step the draft model also computes, so that it has their KV.
            These requests sample nothing, or their first token.
        dropped_req_ids: requests that the runner must drop before this step: finished, aborted or preempted. If the
            runner refused an earlier plan, it may have dropped some of them already.
        kv_connector_metadata: blocks to load and save in this step; None without KV transfer.
        images_to_drop: content hashes of images. The runner drops the features of these images before this step.
        images_to_encode: images whose features the runner must compute in this step, and keep until they are dropped.
    """

    step_id: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequestData] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    new_state_slots: dict[str, int] = field(default_factory=dict)
    sampled_req_ids: list[str] = field(default_factory=list)
    pooled_req_ids: list[str] = field(default_factory=list)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    draft_model_req_ids: list[str] = field(default_factory=list)
    dropped_req_ids: list[str] = field(default_factory=list)
    kv_connector_metadata: KVConnectorMetadata | None = None
    images_to_drop: list[bytes] = field(default_factory=list)
    images_to_encode: list[ImageToEncode] = field(default_factory=list)

    @property
    def composition(self) -> str:
        """Description for logs, such as ``40 tokens of 3 requests (2 of one token, 1 new)``."""
        lengths = list(self.num_scheduled_tokens.values())
        decodes = sum(length == 1 for length in lengths)
        new = len(self.new_requests)
        return f"{sum(lengths)} tokens of {len(lengths)} requests ({decodes} of one token, {new} new)"

    @property
    def loads_kv(self) -> bool:
        """True if the step loads KV or recurrent states into the cache."""
        kv = self.kv_connector_metadata
        return kv is not None and bool(kv.loads or kv.state_loads)

    def with_drafts(self, drafting: Drafting) -> SchedulerOutput:
        """Return the plan with the drafts of ``drafting`` in the place of :data:`UNKNOWN_DRAFT`.

        A request that got fewer drafts than planned also gets fewer scheduled tokens.
        """
        if not drafting.token_ids:
            return self
        planned, drafts = self.scheduled_spec_decode_tokens, drafting.token_ids
        num_scheduled = {r: self.num_scheduled_tokens[r] - len(planned[r]) + len(drafts[r]) for r in drafts}
        given = {request_id: tokens for request_id, tokens in (planned | drafts).items() if tokens}
        num_tokens = self.num_scheduled_tokens | num_scheduled
        return replace(self, num_scheduled_tokens=num_tokens, scheduled_spec_decode_tokens=given)


@dataclass(slots=True)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens. The first token has index ``start`` in the prompt."""

    start: int
    tokens: list[TokenLogprobs]


@dataclass(slots=True)
class Drafting:
    """Result of the draft model or of the draft head in a step.

    Attributes:
        token_ids: request id -> drafts, for the requests whose drafts are :data:`UNKNOWN_DRAFT` in the plan. There are
            fewer drafts than planned if the draft model lacks KV of the request's tokens, if the head has kept no
            output of the step before, or if a draft would end the request. The list can be empty.
        num_computed_tokens: request id -> number of leading tokens and drafts with KV of the draft model. Has only the
            requests for which the draft model ran.
        seconds: total time of the draft model or head, in seconds.
        num_tokens: number of tokens whose missing KV the draft model computed before it drafted. Excludes the drafts
            and each request's token directly before its drafts.
        num_forwards: number of forwards that computed drafts, one draft for each request.
        forward_seconds: time of the forwards that computed drafts, in seconds.
    """

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    num_computed_tokens: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    num_tokens: int = 0
    num_forwards: int = 0
    forward_seconds: float = 0.0


DecodeOutcome = Literal["replayed", "traced", "untraced", "adapters", "large", "refused"]


@dataclass(frozen=True, slots=True)
class DecodeForward:
    """Outcome of the forward of a step in which every row samples.

    Attributes:
        outcome: ``replayed``, or ``traced`` and replayed for the first time. All other values are reasons why the
            forward's graph was built in Python: ``untraced`` (its sizes are new or rare, their trace raised, or its
            recurrent states do not suit a trace), ``adapters`` (some requests have a LoRA adapter), ``large`` (its
            attention is too large for a trace), ``refused`` (replay is disabled).
        refusal: reason why replay is disabled; None while it is enabled.
    """

    outcome: DecodeOutcome
    refusal: str | None


@dataclass(slots=True)
class ModelOutput:
    """Results of a step.

    Attributes:
        sampled_token_ids: one token for each of ``SchedulerOutput.sampled_req_ids``, in that order. For a request with
            drafts, it is the token after the accepted drafts.
        num_accepted_tokens: request id -> number of leading drafts that equal the tokens sampled in their places, for
            requests with drafts. The rows of the rejected drafts are void, and so are the blocks that only they occupy.
        drafting: result of the draft model or head; None if the plan requested nothing from it.
        logprobs: request id -> log probabilities of the request's new tokens, if requested.
        prompt_logprobs: request id -> log probabilities of the prompt tokens in this step, if requested.
        errors: request id -> reason why the request's own parameters end it. Its sampled token is void.
        late_req_ids: sampling requests that needed a grammar mask and sampled without it. Reasons: the mask was not
            ready in time, or the need for a mask was unknown when the step was built.
            Their sampled tokens are void, their drafts are rejected, and their last computed tokens must be recomputed.
            Models with recurrent layers wait for masks, so only the second reason applies to them.
        constrained: request id -> True if the next token now has to match a grammar, for requests whose value has
            changed.
        num_unconstrained_calls: number of tool calls whose grammars failed in this step.
        num_unmasked_drafts: number of drafts that cannot be accepted, because the grammar mask after them is unknown.
        pooled: request id -> vector or logits, [D] float32, for each of ``SchedulerOutput.pooled_req_ids``.
        decode_forward: outcome of the forward; None if not every row samples, or if replay was not requested.
        encode_seconds: seconds that the device took to encode the step's images; 0 without images.
    """

    sampled_token_ids: list[int]
    num_accepted_tokens: dict[str, int] = field(default_factory=dict)
    drafting: Drafting | None = None
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    late_req_ids: set[str] = field(default_factory=set)
    constrained: dict[str, bool] = field(default_factory=dict)
    num_unconstrained_calls: int = 0
    num_unmasked_drafts: int = 0
    pooled: dict[str, np.ndarray] = field(default_factory=dict)
    decode_forward: DecodeForward | None = None
    encode_seconds: float = 0.0

    def drafts_of(self, plan: SchedulerOutput, request_id: str) -> list[int]:
        """Return the drafts that a request with drafts in ``plan`` had, from the plan or from :attr:`drafting`."""
        drafted = None if self.drafting is None else self.drafting.token_ids.get(request_id)
        return plan.scheduled_spec_decode_tokens[request_id] if drafted is None else drafted


class KVCacheLostError(Exception):
    """A step failed and the contents of the KV cache are lost: the KV of all requests must be recomputed."""


class RunnerLostError(Exception):
    """Further steps are impossible: another rank has ended, or the device fails in every step."""


class StepHandle(Protocol):
    """Step in flight."""

    def result(self) -> ModelOutput:
        """Wait for the step to end and return its results. Steps end in the order of their start.

        Raises the error of a failed step, KVCacheLostError if no KV is left, or RunnerLostError. Steps started after a
        failed step are void: their handles must not be used, and their tokens must be computed again.
        """


class Runner(Protocol):
    """Interface of a model runner to the engine."""

    @property
    def replay_refusal(self) -> str | None:
        """Short reason why replay of decode steps is disabled; None while it is enabled, or if it was not requested."""

    def execute(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Start one forward pass and one sampling pass for the plan, without waiting for the device.

        If the plan requests drafts of the draft model or head, this method waits for these drafts only. If the previous
        step is still sampling a request's last token, the token is taken from that step on the device. If this method
        raises an error other than RunnerLostError, the plan is refused, and the steps in flight are unchanged.
        """

    def dispatch_second_part(self) -> None:
        """Dispatch the remaining parts of started steps. Called before new requests are processed and before each plan.

        Never raises: :meth:`StepHandle.result` of the step raises the error.
        """

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Set a callback for the loss of another rank. Another thread calls it, because the loss may hang a step.

        Does nothing with one rank.
        """

    def release_cache(self) -> bool:
        """Free the KV cache, whose contents are lost, until the next step. No step may be in flight.

        Return False without an effect if the runner cannot do that.
        """

    def close(self) -> None:
        """Free the resources of the calling thread. This is the last call, in the thread that ran the steps."""
