"""Selects the requests that get drafts, by how often their earlier drafts were accepted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from metal_engine.request import Request
from metal_engine.scheduling.speculation.acceptance import SourceAcceptance
from metal_engine.scheduling.speculation.draft_costs import DraftCosts, DraftModelProposer, HeadCosts, HeadProposer
from metal_engine.scheduling.speculation.draft_lengths import least_gain
from metal_engine.scheduling.speculation.ngram import NgramProposer
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.step import UNKNOWN_DRAFT

# Maximum number of requests per step whose next draft is only recorded, to compare it with the generated token. Finding
# a draft takes the host some microseconds.
_MAX_NOTED = 4
# Acceptance probabilities are ranked in steps of 1 / _LEVELS: requests of the same rank rotate.
_LEVELS = 8


class Proposer(Protocol):
    """Source of drafts.

    Attributes:
        acceptance: estimated acceptance of the proposer's drafts.
    """

    acceptance: SourceAcceptance

    def begin_step(self) -> None:
        """Prepare for a step. Called before the first :meth:`propose` for the step."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Return up to ``num_tokens`` tokens that may follow the request's tokens.

        If the runner's draft model or head is to fill in the drafts, all returned tokens are :data:`UNKNOWN_DRAFT`.
        Empty if the proposer has no drafts for the request.
        """

    def record_result(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Record the result of a request's last proposal.

        A step has tried the first ``num_drafts`` tokens of the proposal, and accepted the first ``num_accepted``.
        """

    def forget(self, request_id: str) -> None:
        """Drop the data of a request that has ended."""


_PROPOSERS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": NgramProposer,
    "draft_model": DraftModelProposer,
    "mtp": HeadProposer,
}
_COSTS: dict[str, type[DraftCosts]] = {"draft_model": DraftCosts, "mtp": HeadCosts}


def make_proposer(config: SpeculativeConfig) -> Proposer:
    """Return the proposer that the configuration selects."""
    return _PROPOSERS[config.method](config)


def make_costs(config: SpeculativeConfig) -> DraftCosts | None:
    """Return an empty record of the costs of the runner's drafts; None if the runner computes no drafts."""
    costs = _COSTS.get(config.method)
    return None if costs is None else costs()


class Proposals:
    """Obtains drafts from a proposer for the requests that may have drafts, and selects the most promising.

    Args:
        costs: costs of the drafts that the runner computes; None if the runner computes no drafts.

    Attributes:
        acceptance: estimated acceptance of the proposer's drafts.
    """

    def __init__(self, config: SpeculativeConfig, proposer: Proposer, costs: DraftCosts | None) -> None:
        self.acceptance = proposer.acceptance
        self._num_drafts = config.num_speculative_tokens
        self._max_draft_len = config.max_draft_len
        self._proposer = proposer
        self._costs = costs
        self._allows_head = True
        self._least_gain = math.inf  # threshold of the last step with decoding requests
        self._suspended: set[str] = set()
        self._noted: dict[str, tuple[int, int]] = {}  # request id -> index of a token, and its untried draft
        self._rotation = 0
        self._first = 0  # rotation of requests with equally likely drafts

    @property
    def draft_seconds(self) -> float:
        """Time to compute one draft for each request, in seconds; 0 if unknown, or if the runner computes no drafts."""
        return 0.0 if self._costs is None else self._costs.forward_seconds

    def catching_up_seconds(self, request: Request, drafts: list[int]) -> float:
        """Return :meth:`DraftCosts.catching_up_seconds` of a request.

        0 if the time is unknown, or if the runner does not compute ``drafts``, which must not be empty.
        """
        is_asked = self._costs is not None and drafts[0] == UNKNOWN_DRAFT
        return self._costs.catching_up_seconds(request) if self._costs is not None and is_asked else 0.0

    @property
    def _costs_are_known(self) -> bool:
        return self._costs is None or self._costs.are_known

    def begin_step(self, *, allows_head: bool = True) -> None:
        """Prepare for a step. Called before :meth:`select`.

        Args:
            allows_head: False if the step must have no drafts of a draft head.
        """
        self._proposer.begin_step()
        self._allows_head = allows_head

    def select(
        self, decoding: list[Request], num_sampling: int, times: list[float], num_planned: int = 1
    ) -> tuple[dict[Request, list[int]], list[Request]]:
        """Select the requests whose drafts are likely enough to be worth their cost.

        Requests with the likeliest drafts come first. Equally likely requests rotate from step to step. Also evaluates
        the drafts that :meth:`record_untried` has recorded for the requests.

        Args:
            decoding: requests that may have drafts.
            num_sampling: number of requests that sample in the step.
            times: result of :meth:`StepTimes.times`. Its length minus 1 limits the number of requests with drafts and,
                if the runner computes drafts, the total number of drafts.
            num_planned: 1 if the step is planned, so that each request has a placeholder for the token that this step
                samples; 0 if the step is not planned yet. Drafts begin with guesses for all other placeholders.

        Returns:
            The drafts of the selected requests, and the requests whose acceptance is too low or for which no rows are
            left. All other requests are in neither result, for example if the proposer finds no drafts.
        """
        least = least_gain(num_sampling, times, self.draft_seconds)
        least_of_lookups = least if self.acceptance.is_shared else least_gain(num_sampling, times)
        if times and num_planned and self._costs_are_known:
            self._least_gain = least
        if not self._allows_head:
            least = math.inf
        likely: list[Request] = []
        others: list[Request] = []
        for request in decoding:
            if self._may_have_drafts(
                request, request.num_output_placeholders - num_planned, is_planned=num_planned > 0
            ):
                self._compare(request)
                is_likely = (
                    self.acceptance.computed.of(request.request_id) >= least
                    or self.acceptance.lookups.of(request.request_id) >= least_of_lookups
                )
                (likely if is_likely else others).append(request)
        num_rows_left = len(times) - 1
        most = num_rows_left if self._costs_are_known else min(num_rows_left, 1)
        proposals: dict[Request, list[int]] = {}
        ordered = self._by_acceptance(likely)
        lengths = self._computed_lengths(ordered, num_rows_left)
        for request in ordered:
            num_pending = request.num_output_placeholders - num_planned
            if len(proposals) >= most or num_rows_left <= 0:
                others.append(request)
            elif drafts := self._drafts(request, self._most(request, num_pending)):
                is_lookup = drafts[0] != UNKNOWN_DRAFT
                if not is_lookup:
                    drafts = drafts[: num_pending + max(1, lengths[request])]
                if self.acceptance.of(request.request_id, drafts) < (least_of_lookups if is_lookup else least):
                    others.append(request)
                    continue
                proposals[request] = drafts
                # The draft model catches up with a request first, so do not request more drafts than the step can have.
                num_rows_left -= len(drafts) if self._costs is not None else 0
        self._first += num_planned
        return proposals, others

    def _computed_lengths(self, requests: list[Request], num_rows: int) -> Counter[Request]:
        """Return the maximum number of computed drafts for each request. All requests share ``num_rows`` rows.

        Each request may have the maximum number in three cases:

        - The rows suffice for all requests.
        - All drafts are lookups.
        - A draft model makes the drafts. A draft model drafts for a few requests, because it computes their KV first.

        Otherwise, a draft head makes the drafts, and the most likely drafts get the rows. The probability of the n-th
        draft of a request is p^n, because all earlier drafts of the request must be accepted, too.
        """
        has_rows_for_all = num_rows >= len(requests) * self._num_drafts
        if self._costs is None or self._costs.has_prefill or has_rows_for_all:
            return Counter(dict.fromkeys(requests, self._num_drafts))
        acceptances = ((request, self.acceptance.computed.of(request.request_id)) for request in requests)
        gains = [
            (-(p**n), n, i, request)
            for i, (request, p) in enumerate(acceptances)
            for n in range(1, 1 + self._num_drafts)
        ]
        return Counter(request for *_, request in sorted(gains, key=lambda gain: gain[:3])[:num_rows])

    def _by_acceptance(self, requests: list[Request]) -> list[Request]:
        """Return requests ordered by acceptance probability, highest first. Equally likely requests rotate."""
        if len(requests) <= 1:
            return requests
        if self._costs is not None and not self._costs.are_known:
            return sorted(requests, key=self._costs.num_missing_tokens)
        first = self._first % len(requests)
        rotated = [*requests[first:], *requests[:first]]
        return sorted(rotated, key=lambda request: -round(_LEVELS * self.acceptance.best_of(request.request_id)))

    def _may_have_drafts(self, request: Request, num_pending: int, *, is_planned: bool) -> bool:
        if request.request_id in self._suspended:
            if is_planned:
                self._suspended.remove(request.request_id)
            return False
        return request.options.use_speculation and self._most(request, num_pending) > num_pending

    def _most(self, request: Request, num_pending: int) -> int:
        # The last token that the request may generate needs no draft: it is sampled from the row before it.
        most = min(self._num_drafts + num_pending, request.max_tokens - request.num_output_tokens - 1)
        return most if self._max_draft_len is None else min(most, self._max_draft_len - request.num_tokens)

    def _drafts(self, request: Request, most: int) -> list[int]:
        drafts = self._proposer.propose(request, most)
        # A token that ends the request is not drafted: no token follows it.
        end = next((i for i, token_id in enumerate(drafts) if token_id in request.stop_token_id_set), len(drafts))
        return drafts[:end]

    def num_guesses(self, request: Request, drafts: list[int]) -> int:
        """Return how many of a request's leading drafts are guesses for tokens in flight.

        The later drafts depend on these guesses. 0 for drafts of the runner, which computes them from known tokens.
        """
        return 0 if drafts[0] == UNKNOWN_DRAFT else request.num_output_placeholders

    def may_pay_off(self, request: Request) -> bool:
        """Return True if drafts of the draft model are likely to be worth their cost once the request decodes."""
        may_have_drafts = request.options.use_speculation and request.pooling_params is None
        return may_have_drafts and self.acceptance.computed.of(request.request_id) >= self._least_gain

    def record_untried(self, request: Request, drafts: list[int]) -> None:
        """Record the first of a request's unused drafts, to compare the draft with the token that is generated.

        Placeholders of drafts that the runner computes are ignored.
        """
        if drafts and drafts[0] != UNKNOWN_DRAFT:
            self._noted[request.request_id] = request.num_tokens, drafts[0]

    def record_untried_drafts(self, others: list[Request]) -> None:
        """Call :meth:`record_untried` for up to ``_MAX_NOTED`` requests. The next call begins after these requests."""
        for i in range(min(_MAX_NOTED, len(others))):
            request = others[(self._rotation + i) % len(others)]
            self.record_untried(request, self._drafts(request, 1))
        self._rotation += _MAX_NOTED

    def pick_probe_request(self, requests: list[Request]) -> Request | None:
        """Return one of ``requests`` to probe: it gets a draft that is not expected to be worth its cost.

        The requests take turns. Return None if ``requests`` is empty, or if the next request's draft is a lookup or
        exceeds the time budget for probes.
        """
        if self._costs is None or not requests:
            return None
        request = requests[self._rotation // _MAX_NOTED % len(requests)]
        is_unknown = self._drafts(request, 1) == [UNKNOWN_DRAFT]
        return request if is_unknown and self._costs.may_probe(request) else None

    def _compare(self, request: Request) -> None:
        """Compare a request's recorded draft with the generated token, and update the acceptance of lookups.

        Does nothing if no draft is recorded, or if the token at its position is unknown.
        """
        index, draft = self._noted.pop(request.request_id, (request.num_tokens, -1))
        if index < request.num_tokens:
            self.acceptance.lookups.tried(request.request_id, 1, int(request.token_ids[index] == draft))

    def record_result(self, request: Request, planned: list[int], num_drafts: int, num_accepted: int) -> None:
        """Update acceptance and costs with the result of tried drafts.

        Args:
            planned: drafts in the plan. They determine the source whose acceptance is updated.
            num_drafts: number of drafts that were tried. Fewer than planned if the runner had too few drafts.
        """
        self.acceptance.of_source(planned).tried(request.request_id, num_drafts, num_accepted)
        if self._costs is not None:
            self._costs.record_num_tokens(request.request_id, request.num_tokens + num_accepted)
        self._proposer.record_result(request, num_drafts, num_accepted)

    def admitted(self, request_id: str) -> None:
        """Record that the draft model has no KV of a request that was just admitted or resumed."""
        if self._costs is not None:
            self._costs.forget(request_id)

    def suspend_drafts(self, request_id: str) -> None:
        """Suspend drafts of a request for its next planned step."""
        self._suspended.add(request_id)

    def planned_async(self, request_ids: Iterable[str]) -> None:
        """Lift the suspension of drafts for requests of an asynchronously planned step, which had no drafts."""
        self._suspended.difference_update(request_ids)

    def forget(self, request_id: str) -> None:
        """Drop the data of a request that has ended."""
        self._suspended.discard(request_id)
        self._noted.pop(request_id, None)
        self.acceptance.forget(request_id)
        if self._costs is not None:
            self._costs.forget(request_id)
        self._proposer.forget(request_id)
