"""Sources of drafts that compute on the device: their interface to the model runner, and the sampling of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import StepAttention
from metal_engine.models.multimodal.merging import StepImages
from metal_engine.runner.batch import PackedBatch, RequestTable
from metal_engine.runner.logits_edits import NoTokenLeftError, StepEdits
from metal_engine.runner.sampler import sample
from metal_engine.step import UNKNOWN_DRAFT, Drafting, ModelOutput, SchedulerOutput


@dataclass(frozen=True)
class TargetStep:
    """Step of the target model whose forward has been built.

    Attributes:
        table: requests of the runner.
        plan: plan of the step, with the drafts filled in.
        batch: packed rows.
        attention: attention over the rows.
        hidden: hidden states of all rows, [N, hidden_size]; None if the drafter does not need them.
        next_images: image features of the tokens after the rows; None if none of these tokens has a feature.
    """

    table: RequestTable
    plan: SchedulerOutput
    batch: PackedBatch
    attention: StepAttention
    hidden: mx.array | None
    next_images: StepImages | None = None


class FollowedStep(Protocol):
    """Work of a drafter in a step of the target model."""

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate with the step."""

    def finish(self, output: ModelOutput) -> None:
        """Process the output of the step, which has ended."""


class Drafter(Protocol):
    """Source of drafts that computes on the device. Belongs to the thread that loaded the model.

    Attributes:
        needs_hidden: True if :meth:`follow` needs the hidden states of all rows.
        replay_refusal: short reason for which replay of the drafter's forwards is disabled. None if replay is enabled
            or was not requested, and for drafters without replay.
    """

    @property
    def needs_hidden(self) -> bool: ...

    @property
    def replay_refusal(self) -> str | None: ...

    def update(self, plan: SchedulerOutput) -> None:
        """Process the new and dropped requests of a plan. Called before :meth:`draft` with the same plan."""

    def draft(self, table: RequestTable, plan: SchedulerOutput) -> Drafting | None:
        """Compute the drafts that a plan requests. Return None if the plan requests nothing. Waits for the device.

        No step may be in flight if the plan requests drafts, and no snapshot of the pool may exist.
        """

    def follow(self, step: TargetStep, tokens: mx.array | None) -> FollowedStep | None:
        """Build this drafter's work in a step of the target. Return the work; None if no array needs evaluation.

        Args:
            tokens: tokens that the step samples, [R] int32; None for a step that samples nothing.
        """

    def failed(self, error: Exception) -> None:
        """Handle a failed step of the target model. The steps in flight after it have been dropped."""

    def release(self) -> None:
        """Free the memory of the drafter. Call it in the thread that ran the steps."""


@dataclass(slots=True, kw_only=True)
class DraftTask:
    """Drafts of one request in a step.

    Attributes:
        index: index of the request in the request table.
        num_drafts: number of wanted drafts; 0 if only KV is wanted.
        drafts: drafts so far.
        has_ended: True if no more drafts are needed.
    """

    request_id: str
    index: int
    num_drafts: int
    drafts: list[int] = field(default_factory=list)
    has_ended: bool = False

    def take(self, draft: int, stop_token_ids: frozenset[int]) -> None:
        """Append a sampled draft, unless it ends the request. Update :attr:`has_ended`."""
        self.has_ended |= draft in stop_token_ids
        if not self.has_ended:
            self.drafts.append(draft)
            self.has_ended = len(self.drafts) == self.num_drafts


def wanted_drafts(plan: SchedulerOutput) -> dict[str, int]:
    """Return the number of drafts that a plan requests from the runner, by request id."""
    return {r: len(drafts) for r, drafts in plan.scheduled_spec_decode_tokens.items() if drafts[0] == UNKNOWN_DRAFT}


def sample_drafts(table: RequestTable, tasks: Sequence[DraftTask], logits: mx.array) -> mx.array:
    """Sample the next draft of each request as the target will, except for grammars.

    Uses the request's random key of the position, temperature, top-k, top-p, min-p and logits edits. A request with a
    grammar gets no edits. If the edits leave no token, the task ends. The target's step reports the error.

    Args:
        logits: logits of the drafts, [R, vocab_size], as wide as the target's.

    Returns:
        Drafts, [R] int32.
    """
    indices = np.array([task.index for task in tasks], np.int32)
    num_tokens = [len(table.token_ids(task.index, len(task.drafts))) for task in tasks]
    num_prompt_tokens = [table.num_prompt_tokens(task.index) for task in tasks]
    positions = np.array(num_tokens, np.int32) - np.array(num_prompt_tokens, np.int32)
    edits = StepEdits()
    for row, task in enumerate(tasks):
        request_edits = table.edits.get(task.index)
        if request_edits is None or request_edits.grammar is not None:
            continue
        token_ids = table.token_ids(task.index, len(task.drafts))
        try:
            if not task.drafts:
                request_edits.catch_up(token_ids)
            edits.add(row, request_edits, token_ids, int(positions[row]), len(task.drafts))
        except NoTokenLeftError:
            task.has_ended = True
    if edits.rows:
        logits, at = logits.astype(mx.float32), mx.array(np.array(edits.rows, np.int32))
        logits[at] = edits.apply(logits[at], np.zeros((0, 0), np.int32))
    return sample(logits, table.sampling, indices, positions)
