"""Speculation in tests: its configuration, and drafts with a known share of right tokens."""

from __future__ import annotations

import random
from typing import Any

from metal_engine.engine.core import EngineCore
from metal_engine.request import Request
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.speculation.acceptance import SourceAcceptance
from metal_engine.scheduling.speculation.async_planning import AsyncPlanning
from metal_engine.scheduling.speculation.draft_costs import DraftCosts
from metal_engine.scheduling.speculation.draft_gain import DraftGain, UnmeasuredGain
from metal_engine.scheduling.speculation.proposals import Proposer, make_proposer
from metal_engine.scheduling.speculation.speculation import Speculation
from metal_engine.scheduling.speculation.step_times import StepTimes
from metal_engine.settings.config import SpeculativeConfig


def speculative_config(num_speculative_tokens: int = 4, longest: int = 4, shortest: int = 2) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_speculative_tokens,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
    )


def draft_model_config(num_speculative_tokens: int = 4, max_draft_len: int | None = None) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="draft_model", num_speculative_tokens=num_speculative_tokens, prompt_lookup_max=5, prompt_lookup_min=5,
        model="draft", max_draft_len=max_draft_len,
    )  # fmt: skip


def head_config(num_speculative_tokens: int = 3) -> SpeculativeConfig:
    """Return a configuration with a draft head, whose lookups need matches too long for tiny requests."""
    return SpeculativeConfig(
        method="mtp", num_speculative_tokens=num_speculative_tokens, prompt_lookup_max=64, prompt_lookup_min=64
    )


class KnownTimes(StepTimes):
    """Step times that are set by the test, so that plans do not depend on the machine.

    Args:
        row_seconds: time per row, added to one second per step.
    """

    def __init__(self, row_seconds: float = 0.0) -> None:
        super().__init__()
        self._row_seconds = row_seconds

    def times(self, num_rows: int, most: int) -> list[float]:
        return [1 + self._row_seconds * n for n in range(num_rows, num_rows + most + 1)]


class KnownAheadTimes(AsyncPlanning):
    """Times of asynchronously planned steps that are set by the test."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self._step_seconds = step_seconds

    def seconds(self, num_rows: int) -> float | None:
        return self._step_seconds


class Drafter:
    """Base of drafters whose drafts depend on no step and no result."""

    def __init__(self) -> None:
        self.acceptance = SourceAcceptance()

    def begin_step(self) -> None:
        """Do nothing: drafts do not depend on the step."""

    def record_result(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Do nothing: results are not counted."""

    def forget(self, request_id: str) -> None:
        """Do nothing: no state of a request is stored."""


class KnownOutputs(Drafter):
    """Drafter that proposes the known outputs of requests. Each draft is right with a given probability.

    Args:
        outputs: output tokens by prompt.
        seed: random seed for the choice of right drafts.
        rightness: probability that a draft is right if the drafts before it are right.
    """

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], seed: int = 0, rightness: float = 0.7) -> None:
        super().__init__()
        self._outputs = outputs
        self._random = random.Random(seed)
        self._rightness = rightness
        self.num_right = self.num_wrong = 0

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        output = self._outputs[tuple(request.token_ids[: request.num_prompt_tokens])]
        drafts = output[request.num_output_tokens : request.num_output_tokens + num_tokens]
        for i, token_id in enumerate(drafts):
            if self._random.random() > self._rightness:
                self.num_wrong += 1
                drafts[i] = token_id - 1 if token_id else 1  # a token of any vocabulary
            else:
                self.num_right += 1
        return drafts


class FreeDrafts(DraftCosts):
    """Costs of a draft model that takes no time, so that plans do not depend on the machine.

    Args:
        may_probe: True to try drafts immediately even if they are not expected to pay off, False to never try them.
    """

    def __init__(self, *, may_probe: bool = True) -> None:
        super().__init__()
        self._may_try = may_probe

    @property
    def are_known(self) -> bool:
        return True

    def measured(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: costs do not depend on measurements."""

    def may_probe(self, request: Request) -> bool:
        return self._may_try


def speculate(
    scheduler: Scheduler,
    proposer: Proposer,
    times: StepTimes | None = None,
    costs: DraftCosts | None = None,
    *,
    async_planning: AsyncPlanning | None = None,
    gain: DraftGain | None = None,
) -> None:
    """Replace the speculation of a scheduler. By default, draft rows are free, and no gain is measured."""
    scheduler.speculation = Speculation(
        scheduler.config,
        scheduler.blocks,
        proposer,
        times or KnownTimes(),
        costs,
        states=scheduler.states,
        async_planning=async_planning,
        gain=gain or UnmeasuredGain(),
    )


def draft_for_free(engine: EngineCore, *, may_probe: bool = True) -> None:
    """Make an engine treat its draft model's forwards and rows as free.

    Asynchronously planned steps take 0.7 of the time of other steps.
    """
    speculative = engine.config.scheduler.speculative
    costs, ahead = FreeDrafts(may_probe=may_probe), KnownAheadTimes(0.7)
    speculate(engine.scheduler, make_proposer(speculative), costs=costs, async_planning=ahead)


def propose_from(engine: EngineCore, proposer: Proposer) -> None:
    """Replace the drafter of an engine by ``proposer`` and treat draft rows as free.

    Asynchronously planned steps take 0.7 of the time of other steps.
    """
    speculate(engine.scheduler, proposer, async_planning=KnownAheadTimes(0.7))
