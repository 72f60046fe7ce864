"""What the scheduler, the runner and the engine say to each other about one step: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from metal_engine.pooling_params import PoolingParams
from metal_engine.request import Request, TokenLogprobs
from metal_engine.sampling_params import NO_RULES, SamplingParams, TokenRules

# A draft that the scheduler leaves to the runner's draft model.
UNKNOWN_DRAFT = -1
# Tokens of a request that are new to the draft model in each step that drafts: the last one, and the last draft where
# all came.
NEW_TO_DRAFT_MODEL = 2


@dataclass(slots=True)
class NewRequestData:
    """A request the runner has not seen, or has been told to drop since: everything about it.

    Attributes:
        token_ids: all tokens known so far: the prompt, and outputs when it resumes after preemption.
        block_ids: its whole block table.
        rules: what ``sampling_params`` mean in the model's tokens.
        seed: of its draws.
        pooling_params: how to pool its prompt; None to generate.
        state_slots: of the recurrent state that it goes on from (0: none), and of the one that it leaves.
        adapter_slot: of the adapter that its rows go through; 0: none.
        stop_token_ids: tokens that end it, after which nothing is to be drafted.
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
        )


@dataclass(slots=True)
class KVConnectorMetadata:
    """Blocks, and recurrent states, that a step moves between the KV cache and a store.

    Attributes:
        loads: block id -> its contents, uint8 [bytes of a block]; they go in before anything is computed.
        saves: (hash, block id) of blocks that are complete when the step has ended.
        state_loads: slot -> the state that belongs there, uint8 [bytes of a state]; likewise.
        state_saves: (hash of the prefix's last block, slot) of states that are there when the step has ended.
    """

    loads: dict[int, np.ndarray] = field(default_factory=dict)
    saves: list[tuple[bytes, int]] = field(default_factory=list)
    state_loads: dict[int, np.ndarray] = field(default_factory=dict)
    state_saves: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan: who gets how many tokens.

    Attributes:
        step_id: counts steps from 0.
        num_scheduled_tokens: request id -> query length, in packing order. A decode is a length of 1, and of 1 + k with
            k drafts.
        new_requests: requests in this step that the runner does not hold.
        new_block_ids: request id -> blocks appended to the table of a request the runner holds.
        new_state_slots: request id -> slot in which a request that the runner holds leaves its recurrent states from
            this step on; it still goes on from the one before.
        sampled_req_ids: requests whose last known token is in this step, so that it samples their next one,
            in packing order. An intermediate chunk is not among them, nor is a request to pool.
        pooled_req_ids: requests to pool whose prompts this step completes, in packing order.
        scheduled_spec_decode_tokens: request id -> its drafts: tokens that may follow its last known one, which is in
            this step, and that are computed as if they did. It samples after the last known token and after each draft.
            Those that are :data:`UNKNOWN_DRAFT`, all of a request then, the draft model is to say; it may say fewer.
        draft_model_req_ids: requests of whose tokens in this step, which sample nothing or their first token, the draft
            model is to have KV, too.
        dropped_req_ids: requests the runner must forget before this step: finished, aborted or preempted. After a plan
            that the runner refused, some may be requests that it has already forgotten.
        kv_connector_metadata: blocks to load and save with this step; None without KV transfer.
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

    @property
    def composition(self) -> str:
        """What the step computes, in words."""
        lengths = list(self.num_scheduled_tokens.values())
        decodes = sum(length == 1 for length in lengths)
        new = len(self.new_requests)
        return f"{sum(lengths)} tokens of {len(lengths)} requests ({decodes} of one token, {new} new)"

    def with_drafts(self, drafting: Drafting) -> SchedulerOutput:
        """Returns the plan with a draft model's drafts in it; rows of drafts that there are not are left out."""
        if not drafting.token_ids:
            return self
        planned, drafts = self.scheduled_spec_decode_tokens, drafting.token_ids
        shares = {r: self.num_scheduled_tokens[r] - len(planned[r]) + len(drafts[r]) for r in drafts}
        given = {request_id: tokens for request_id, tokens in (planned | drafts).items() if tokens}
        num_tokens = self.num_scheduled_tokens | shares
        return replace(self, num_scheduled_tokens=num_tokens, scheduled_spec_decode_tokens=given)


@dataclass(slots=True)
class PromptLogprobs:
    """Log probabilities of consecutive prompt tokens, the first of which has index ``start``."""

    start: int
    tokens: list[TokenLogprobs]


@dataclass(slots=True)
class Drafting:
    """What a draft model did in a step.

    Attributes:
        token_ids: by request id, of those whose drafts were left to it: the drafts. There are fewer than planned where
            it has no KV of all the request's tokens yet, where a draft would end the request, or where none would do.
        num_computed_tokens: by request id, of those it was run for: from the first, tokens and drafts with KV of it.
        seconds: that all of it took.
        num_tokens: that it had not computed before, beside the drafts and those before them.
        num_forwards: that computed drafts, one for each request.
        forward_seconds: that those took.
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
    """How the forward of a step in which every row samples came about.

    Attributes:
        outcome: ``replayed``, or ``traced`` and replayed for the first time; or why it was built: ``untraced`` (its
            sizes are new or rare, or their trace raised), ``adapters`` (some of its requests have one), ``large`` (it
            takes too much in one piece), ``refused``.
        refusal: why no step is replayed; None where steps are.
    """

    outcome: DecodeOutcome
    refusal: str | None


@dataclass(slots=True)
class ModelOutput:
    """What a step computed.

    Attributes:
        sampled_token_ids: one token for each of ``SchedulerOutput.sampled_req_ids``, in that order: of a request with
            drafts, the one after those that are accepted.
        num_accepted_tokens: by request id, of those with drafts: how many of them, from the first, are what was sampled
            in their places. The rows of the others are void, and so are the blocks that only they took.
        drafting: what the draft model did; None if nothing was asked of it.
        logprobs: by request id, of the tokens it is given, where asked for.
        prompt_logprobs: by request id, of the prompt tokens in this step, where asked for.
        errors: by request id, why what the request asks for must end it. Its sampled token is void.
        late_req_ids: sampling requests whose grammar has not told yet what it allows. Their sampled tokens are void,
            their drafts rejected, and the last tokens that they have computed are to be computed again.
        num_unmasked_drafts: drafts that cannot be accepted, since what their grammar allows after them is not known.
        pooled: by request id, what each of ``SchedulerOutput.pooled_req_ids`` comes to, [D] float32.
        decode_forward: None where not every row samples, or no step is to be replayed.
    """

    sampled_token_ids: list[int]
    num_accepted_tokens: dict[str, int] = field(default_factory=dict)
    drafting: Drafting | None = None
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    late_req_ids: set[str] = field(default_factory=set)
    num_unmasked_drafts: int = 0
    pooled: dict[str, np.ndarray] = field(default_factory=dict)
    decode_forward: DecodeForward | None = None

    def drafts_of(self, plan: SchedulerOutput, request_id: str) -> list[int]:
        """Returns the drafts that a request of ``plan`` had, whoever proposed them."""
        drafted = None if self.drafting is None else self.drafting.token_ids.get(request_id)
        return plan.scheduled_spec_decode_tokens[request_id] if drafted is None else drafted


class KVCacheLostError(Exception):
    """A step failed and took the KV cache with it: all KV computed so far must be computed again."""


class RunnerLostError(Exception):
    """No step can run any more: another process that computes its share of every step has gone."""


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> ModelOutput:
        """Wait for the step to end; steps end in the order in which they were started.

        Raises what the step raised; KVCacheLostError if no KV is left. Steps started after one that raised are
        void: they are not run, their handles must not be asked, and what they planned must be computed again.
        """


class Runner(Protocol):
    """What the engine needs of a model runner."""

    @property
    def replay_refusal(self) -> str | None:
        """Why no decode step is replayed; None as far as is known, and where none is to be."""

    def execute(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Start one forward pass and one sampling pass over the plan; must not wait for the device to compute them.

        A plan that asks the draft model for something waits for that, and for nothing else.

        Where a request's last token is still being sampled by the step before, it is taken from there. A plan
        that is refused (this raises) leaves the steps under way as they are.
        """

    def dispatch_second_part(self) -> None:
        """Give the device what it lacks of steps that it has begun; called before requests are taken in and each plan.

        Raises nothing: where it fails, the step's result raises that.
        """

    def close(self) -> None:
        """Let go of what belongs to the calling thread. This is the last call, in the thread that ran the steps."""


class RankFailureSource(Protocol):
    """The other processes that compute their shares of every step."""

    def on_rank_lost(self, tell: Callable[[RunnerLostError], None]) -> None:
        """Have ``tell`` called, in another thread, when one of them has gone: a step may then hang for ever."""
