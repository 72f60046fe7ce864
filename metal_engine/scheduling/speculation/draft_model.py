"""What a draft model is asked for, and what it costs. It runs where the model does; here only drafts are counted."""

from __future__ import annotations

from collections.abc import Container

from metal_engine.request import Request
from metal_engine.scheduling.speculation.ngram import TOKENS_PER_STEP, PredictedTexts
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.step import NEW_TO_DRAFT_MODEL, UNKNOWN_DRAFT, Drafting

# Steps among which the time to catch up with a request is divided, at most: it may go on for so long.
_CATCHING_UP_STEPS = 128
# How much of the time goes to seeing whether drafts that did not pay would now.
_TRYING_SHARE = 0.02
# How much one measurement changes what is known, and how much longer than known one counts as at most: something else
# has held it up.
_WEIGHT = 0.25
_HELD_UP = 1.5


class DraftModelProposer:
    """Drafts for all requests, which a draft model fills in.

    Implements :class:`metal_engine.scheduling.speculation.speculation.Proposer`.

    They are of the text that a request's client expects, as long as the request follows one; those are known at once.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._predictions = PredictedTexts(config)
        self._room = 0

    def begin_step(self) -> None:
        self._room = TOKENS_PER_STEP

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        drafts, num_indexed = self._predictions.propose(request, num_tokens, self._room)
        self._room -= num_indexed
        return drafts or [UNKNOWN_DRAFT] * num_tokens

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._predictions.settled(request, num_drafts, num_accepted)

    def forget(self, request_id: str) -> None:
        self._predictions.forget(request_id)


class _Seconds:
    """What something takes, from measurements.

    Attributes:
        first: may have compiled something; 0 until there is one.
        known: 0 until there are two.
    """

    def __init__(self) -> None:
        self.known = self.first = 0.0

    def measured(self, seconds: float) -> None:
        seconds = max(seconds, 1e-12)
        if self.known:
            self.known += _WEIGHT * (min(seconds, _HELD_UP * self.known) - self.known)
        elif self.first:
            self.known = min(self.first, seconds)
        else:
            self.first = seconds


class DraftCosts:
    """What a draft model takes, as it is measured, and what may be spent on drafts that are not expected to pay."""

    def __init__(self) -> None:
        self._forward = _Seconds()  # that gives each request a draft
        self._token = _Seconds()  # that it has fallen behind
        self._seconds = 0.0  # of all steps
        self._tried_seconds = 0.0  # of them, for drafts that were not expected to pay
        self._num_computed: dict[str, int] = {}  # by request: tokens that the draft model has, as far as is known

    @property
    def forward_seconds(self) -> float:
        """Of a forward that gives each request a draft; 0 while that is not known."""
        return self._forward.known

    @property
    def _token_seconds(self) -> float:
        """Of a token that the draft model has fallen behind: never more than a forward takes; 0 while not known."""
        return self._token.known or min(self._token.first, self.forward_seconds)

    @property
    def are_known(self) -> bool:
        """Until then one request has drafts, and no prompt is followed."""
        return self.forward_seconds > 0

    def measured(
        self, step_seconds: float, drafting: Drafting | None, requests: Container[str], *, is_try: bool
    ) -> None:
        """Take in a step, and what the draft model did in it.

        Args:
            requests: ids of those that have not ended.
            is_try: whether its drafts were not expected to pay.
        """
        self._seconds += step_seconds
        if drafting is None:
            return
        if is_try:
            self._tried_seconds += drafting.seconds
        self._num_computed |= {r: n for r, n in drafting.num_computed_tokens.items() if r in requests}
        if drafting.num_forwards:
            self._forward.measured(drafting.forward_seconds / drafting.num_forwards)
        if drafting.num_tokens:
            self._token.measured((drafting.seconds - drafting.forward_seconds) / drafting.num_tokens)

    def num_missing_tokens(self, request: Request) -> int:
        """Returns how many tokens of a request the draft model lacks, beside those that are new in each step."""
        return request.num_tokens - NEW_TO_DRAFT_MODEL - self._num_computed.get(request.request_id, 0)

    def may_probe(self, request: Request) -> bool:
        """Whether a draft of a request may be computed only to see whether it comes."""
        num_missing_tokens = self.num_missing_tokens(request) + NEW_TO_DRAFT_MODEL
        seconds = self.forward_seconds + num_missing_tokens * (self._token_seconds or self.forward_seconds)
        return self._tried_seconds + seconds <= _TRYING_SHARE * self._seconds

    def catching_up_seconds(self, request: Request) -> float:
        """What it takes to compute the tokens of a request that the draft model lacks: the share of each further step.

        0 while nothing is known of that.
        """
        num_steps = min(_CATCHING_UP_STEPS, request.max_tokens - request.num_output_tokens)
        return max(0, self.num_missing_tokens(request)) * self._token_seconds / max(1, num_steps)

    def settled(self, request_id: str, num_tokens: int) -> None:
        """A request has so many tokens, accepted drafts among them: KV of others is of rejected drafts."""
        self._num_computed[request_id] = min(num_tokens, self._num_computed.get(request_id, 0))

    def forget(self, request_id: str) -> None:
        """A request has ended, or lost its blocks."""
        self._num_computed.pop(request_id, None)
