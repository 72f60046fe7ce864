"""Proposers and measured costs of drafts that a draft model or a draft head computes.

The draft model and the draft head run in the runner. The proposers here return a placeholder
(:data:`metal_engine.step.UNKNOWN_DRAFT`) for each draft.
"""

from __future__ import annotations

from collections.abc import Container

from metal_engine.request import Request
from metal_engine.scheduling.speculation.acceptance import SourceAcceptance
from metal_engine.scheduling.speculation.ngram import NgramProposer, PredictedTextProposer
from metal_engine.scheduling.speculation.step_times import averaged
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.step import NEW_TO_DRAFT_MODEL, UNKNOWN_DRAFT, Drafting

# Maximum number of steps over which the time to catch up with a request is spread, because a request may end long
# before ``max_tokens``.
_CATCHING_UP_STEPS = 128
# Weight of a new measurement, and its maximum ratio to the average (:func:`averaged`).
_WEIGHT = 0.25
_MAX_RATIO = 1.5
# Initial estimate of the acceptance of a draft head's drafts. A high estimate would cost time if drafts are rejected.
# A few accepted drafts are enough to raise a low estimate.
_HEAD_GUESS = 0.3


class DraftModelProposer(PredictedTextProposer):
    """Proposer of drafts from a predicted text, or of placeholders that the draft model replaces.

    Placeholders are proposed if the request follows no predicted text.
    """

    def _from_elsewhere(self, request: Request, num_tokens: int) -> list[int]:
        return [UNKNOWN_DRAFT] * num_tokens


class HeadProposer(NgramProposer):
    """Proposer for a draft head. Drafts come from a predicted text, from prompt lookup, or from the head.

    Drafts of the head are placeholders, which the runner fills in.

    A request uses prompt lookup if its lookups are estimated to be accepted at least as often as drafts of the head.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self.acceptance = SourceAcceptance(_HEAD_GUESS)

    def _from_elsewhere(self, request: Request, num_tokens: int) -> list[int]:
        drafts = super()._from_elsewhere(request, num_tokens)
        lookups, head = (one.of(request.request_id) for one in (self.acceptance.lookups, self.acceptance.computed))
        return drafts if drafts and lookups >= head else [UNKNOWN_DRAFT] * num_tokens


class _Seconds:
    """Estimated duration of an operation, from measurements.

    Attributes:
        first: first measurement in seconds, which may include compilation; 0 before this measurement.
        known: current estimate in seconds; 0 before the second measurement.
    """

    def __init__(self) -> None:
        self.known = self.first = 0.0

    def measured(self, seconds: float) -> None:
        seconds = max(seconds, 1e-12)
        if self.known:
            self.known = averaged(self.known, seconds, _WEIGHT, _MAX_RATIO)
        elif self.first:
            self.known = min(self.first, seconds)
        else:
            self.first = seconds


class DraftCosts:
    """Measured costs of a draft model, and the time budget for drafts that are not expected to be worth their cost.

    Attributes:
        has_prefill: True if the draft model also computes prompts, because its drafts need their KV.
        probe_fraction: maximum fraction of the total step time that probes may add. A probe is a draft that is not
            expected to be worth its cost. It tests this expectation.
    """

    has_prefill = True
    probe_fraction = 0.02

    def __init__(self) -> None:
        self._forward = _Seconds()  # one forward, which drafts one token for each request
        self._token = _Seconds()  # one token that the draft model has to catch up with
        self._seconds = 0.0  # total duration of all steps
        self._probe_seconds = 0.0  # time that probes have added to steps
        self._num_computed: dict[str, int] = {}  # request id -> leading tokens with KV of the draft model

    @property
    def forward_seconds(self) -> float:
        """Seconds of a forward that drafts one token for each request; 0 before the second measurement."""
        return self._forward.known

    @property
    def _token_seconds(self) -> float:
        """Estimated time for the draft model to compute the missing KV of one token, in seconds.

        0 before the first measurement. At most :attr:`forward_seconds` before the second measurement.
        """
        return self._token.known or min(self._token.first, self.forward_seconds)

    @property
    def are_known(self) -> bool:
        """True after two measurements of a forward.

        Until then, only one request of a step has drafts, and the draft model prefills no prompt.
        """
        return self.forward_seconds > 0

    def measured(
        self, step_seconds: float, drafting: Drafting | None, requests: Container[str], *, probe_seconds: float = 0.0
    ) -> None:
        """Record the durations of a step and of the draft model's work in it.

        Args:
            step_seconds: duration of the step, including the draft model's work.
            drafting: result of the draft model in the step; None if it did not run.
            requests: ids of unfinished requests.
            probe_seconds: time that a probe has added to the step, in seconds; 0 without a probe.
        """
        self._seconds += step_seconds
        self._probe_seconds += probe_seconds
        if drafting is None:
            return
        self._num_computed |= {r: n for r, n in drafting.num_computed_tokens.items() if r in requests}
        if drafting.num_forwards:
            self._forward.measured(drafting.forward_seconds / drafting.num_forwards)
        if drafting.num_tokens:
            self._token.measured((drafting.seconds - drafting.forward_seconds) / drafting.num_tokens)

    def num_missing_tokens(self, request: Request) -> int:
        """Return how many tokens of a request lack KV of the draft model.

        Every step has :data:`NEW_TO_DRAFT_MODEL` new tokens, which are left out of the result. If some of them have KV
        already, the result is negative.
        """
        return request.num_tokens - NEW_TO_DRAFT_MODEL - self._num_computed.get(request.request_id, 0)

    def may_probe(self, request: Request) -> bool:
        """Return True if the time budget for probes allows a draft of this request."""
        num_missing_tokens = self.num_missing_tokens(request) + NEW_TO_DRAFT_MODEL
        seconds = self.forward_seconds + num_missing_tokens * (self._token_seconds or self.forward_seconds)
        return self._probe_seconds + seconds <= self.probe_fraction * self._seconds

    def catching_up_seconds(self, request: Request) -> float:
        """Return the time that the draft model needs to catch up with a request, in seconds per step.

        The total time is spread over the request's next steps, at most ``_CATCHING_UP_STEPS``. 0 if it is unknown.
        """
        num_steps = min(_CATCHING_UP_STEPS, request.max_tokens - request.num_output_tokens)
        return max(0, self.num_missing_tokens(request)) * self._token_seconds / max(1, num_steps)

    def record_num_tokens(self, request_id: str, num_tokens: int) -> None:
        """Record that a request has ``num_tokens`` tokens, including its accepted drafts.

        The draft model's KV of later positions belongs to rejected drafts, and no longer counts.
        """
        self._num_computed[request_id] = min(num_tokens, self._num_computed.get(request_id, 0))

    def forget(self, request_id: str) -> None:
        """Drop the data of a request that has ended or lost its blocks."""
        self._num_computed.pop(request_id, None)


class HeadCosts(DraftCosts):
    """Measured costs of a draft head. The head follows each step of its model, so no KV is missing."""

    has_prefill = False
    probe_fraction = 0.005  # computing the head's KV takes another percent of each step

    def __init__(self) -> None:
        super().__init__()
        # True if the head returned no drafts, because it had kept no output of the step before (`HeadDrafter`).
        self._may_retry = False

    def num_missing_tokens(self, request: Request) -> int:
        return -NEW_TO_DRAFT_MODEL

    def may_probe(self, request: Request) -> bool:
        return self._may_retry or super().may_probe(request)

    def measured(
        self, step_seconds: float, drafting: Drafting | None, requests: Container[str], *, probe_seconds: float = 0.0
    ) -> None:
        super().measured(step_seconds, drafting, requests, probe_seconds=probe_seconds)
        if drafting is not None and drafting.token_ids:
            self._may_retry = not self._may_retry and not any(drafting.token_ids.values())

    def record_num_tokens(self, request_id: str, num_tokens: int) -> None:
        """Do nothing: the number of tokens with KV of a head is not tracked."""
