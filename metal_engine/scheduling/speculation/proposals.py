"""Which requests have drafts that are likely enough to pay: what is proposed, and what has become of it so far."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from metal_engine.request import Request
from metal_engine.scheduling.speculation.draft_lengths import Acceptance, least_gain
from metal_engine.scheduling.speculation.draft_model import DraftCosts, DraftModelProposer
from metal_engine.scheduling.speculation.ngram import NgramProposer
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.step import UNKNOWN_DRAFT

# Requests of a step whose drafts would not pay, and that have one noted only to be compared with what comes. To find
# drafts takes the host some microseconds.
_MAX_NOTED = 4
# Drafts of two requests are as likely to be accepted where that differs by less than one in so many.
_LEVELS = 8


class Proposer(Protocol):
    """Where drafts come from."""

    def begin_step(self) -> None:
        """Called before the proposals of a step."""

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        """Returns what may follow the request's tokens, ``num_tokens`` tokens at most.

        Tokens may be :data:`UNKNOWN_DRAFT`, all of them then: a draft model fills them in.
        """

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Called when the first ``num_drafts`` tokens of the last proposal have been tried."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; it has ended."""


def make_proposer(config: SpeculativeConfig) -> Proposer:
    """The proposer that a configuration asks for."""
    return DraftModelProposer(config) if config.method == "draft_model" else NgramProposer(config)


class Proposals:
    """Asks a proposer for drafts of the requests that may have some.

    Args:
        costs: of the draft model, if there is one.

    Attributes:
        acceptance: how likely drafts are accepted.
    """

    def __init__(self, config: SpeculativeConfig, proposer: Proposer, costs: DraftCosts | None) -> None:
        self.acceptance = Acceptance()
        self._num_drafts = config.num_speculative_tokens
        self._max_draft_len = config.max_draft_len
        self._proposer = proposer
        self._costs = costs
        self._least_gain = math.inf  # of the last step with requests that decode
        self._held_up: set[str] = set()
        self._noted: dict[str, tuple[int, int]] = {}  # request id -> index of a token, and a draft of it
        self._turn = 0
        self._first = 0  # of requests whose drafts are as likely

    @property
    def draft_seconds(self) -> float:
        """What it takes to find one draft of each request."""
        return 0.0 if self._costs is None else self._costs.forward_seconds

    def catching_up_seconds(self, request: Request, drafts: list[int]) -> float:
        """What it takes a draft model to catch up with a request, of each further step; 0 if it is not asked."""
        is_asked = self._costs is not None and drafts[0] == UNKNOWN_DRAFT
        return self._costs.catching_up_seconds(request) if self._costs is not None and is_asked else 0.0

    @property
    def _costs_are_known(self) -> bool:
        return self._costs is None or self._costs.are_known

    def begin_step(self) -> None:
        """Called before the proposals of a step."""
        self._proposer.begin_step()

    def of(
        self, decoding: list[Request], num_sampling: int, times: list[float], num_planned: int = 1
    ) -> tuple[dict[Request, list[int]], list[Request]]:
        """Returns the drafts of the requests whose drafts are likely enough to pay, as far as there is room for them.

        First those come whose drafts are the likeliest, and of equals others in each step: there may be no room for
        all. With them come other requests, whose drafts are not likely enough.

        Args:
            num_sampling: requests that sample in the step.
            times: of :meth:`StepTimes.times`.
            num_planned: of each request's tokens that are not known yet, those that this step samples: 1, or 0 if it is
                not planned. Drafts begin with what stands for the others.
        """
        least = least_gain(num_sampling, times, self.draft_seconds)
        if times and num_planned and self._costs_are_known:
            self._least_gain = least
        likely: list[Request] = []
        others: list[Request] = []
        for request in decoding:
            if self._may_have_drafts(
                request, request.num_output_placeholders - num_planned, is_planned=num_planned > 0
            ):
                self._compare(request)
                (others if self.acceptance.of(request.request_id) < least else likely).append(request)
        room = len(times) - 1
        most = room if self._costs_are_known else min(room, 1)
        proposals: dict[Request, list[int]] = {}
        for request in self._in_turn(likely):
            if len(proposals) >= most or room <= 0:
                others.append(request)
            elif drafts := self._drafts(request, self._most(request, request.num_output_placeholders - num_planned)):
                proposals[request] = drafts
                # A draft model catches up with a request first, so it is not asked for more than the step has room for.
                room -= len(drafts) if self._costs is not None else 0
        self._first += num_planned
        return proposals, others

    def _in_turn(self, requests: list[Request]) -> list[Request]:
        """Returns requests with those first whose drafts are likely; others lead those that are much the same."""
        if len(requests) <= 1:
            return requests
        if self._costs is not None and not self._costs.are_known:
            return sorted(requests, key=self._costs.num_missing_tokens)
        first = self._first % len(requests)
        turns = [*requests[first:], *requests[:first]]
        return sorted(turns, key=lambda request: -round(_LEVELS * self.acceptance.of(request.request_id)))

    def _may_have_drafts(self, request: Request, num_pending: int, *, is_planned: bool) -> bool:
        if request.request_id in self._held_up:
            if is_planned:
                self._held_up.remove(request.request_id)
            return False
        return request.options.use_speculation and self._most(request, num_pending) > num_pending

    def _most(self, request: Request, num_pending: int) -> int:
        # The last token that it may generate needs no draft: it is sampled after the one before it.
        most = min(self._num_drafts + num_pending, request.max_tokens - request.num_output_tokens - 1)
        return most if self._max_draft_len is None else min(most, self._max_draft_len - request.num_tokens)

    def _drafts(self, request: Request, most: int) -> list[int]:
        drafts = self._proposer.propose(request, most)
        # A token that would end the request can be sampled, but nothing comes after it.
        end = next((i for i, token_id in enumerate(drafts) if token_id in request.stop_token_id_set), len(drafts))
        return drafts[:end]

    def num_known_places(self, request: Request, drafts: list[int]) -> int:
        """Returns how many of a request's drafts stand for tokens under way, and must come true for the others to."""
        return 0 if drafts[0] == UNKNOWN_DRAFT else request.num_output_placeholders

    def may_pay_off(self, request: Request) -> bool:
        """Whether a draft model's drafts of a request are likely to pay when it decodes."""
        may_have_drafts = request.options.use_speculation and request.pooling_params is None
        return may_have_drafts and self.acceptance.of(request.request_id) >= self._least_gain

    def note(self, request: Request, drafts: list[int]) -> None:
        """Note the first of some drafts that are not tried, to see whether it comes."""
        if drafts and drafts[0] != UNKNOWN_DRAFT:
            self._noted[request.request_id] = request.num_tokens, drafts[0]

    def record_untried_drafts(self, others: list[Request]) -> None:
        """Note the next draft of some requests, where it is known, to see whether it comes."""
        for i in range(min(_MAX_NOTED, len(others))):
            request = others[(self._turn + i) % len(others)]
            self.note(request, self._drafts(request, 1))
        self._turn += _MAX_NOTED

    def pick_probe_request(self, requests: list[Request]) -> Request | None:
        """Returns one of some requests whose drafts do not pay, for which the draft model may say one nevertheless."""
        if self._costs is None or not requests:
            return None
        request = requests[self._turn // _MAX_NOTED % len(requests)]
        is_unknown = self._drafts(request, 1) == [UNKNOWN_DRAFT]
        return request if is_unknown and self._costs.may_probe(request) else None

    def _compare(self, request: Request) -> None:
        """See whether a draft that was only noted has come."""
        index, draft = self._noted.pop(request.request_id, (request.num_tokens, -1))
        if index < request.num_tokens:
            self.acceptance.tried(request.request_id, 1, int(request.token_ids[index] == draft))

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Take in what became of drafts that were tried."""
        self.acceptance.tried(request.request_id, num_drafts, num_accepted)
        if self._costs is not None:
            self._costs.settled(request.request_id, request.num_tokens + num_accepted)
        self._proposer.settled(request, num_drafts, num_accepted)

    def admitted(self, request_id: str) -> None:
        """A request has been admitted, maybe again: what a draft model had of it may be gone."""
        if self._costs is not None:
            self._costs.forget(request_id)

    def suspend_drafts(self, request_id: str) -> None:
        """Let a request have no drafts in the next step that is planned."""
        self._held_up.add(request_id)

    def planned_ahead(self, request_ids: Iterable[str]) -> None:
        """A step of these requests was planned ahead, without drafts: none is held up any more."""
        self._held_up.difference_update(request_ids)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended."""
        self._held_up.discard(request_id)
        self._noted.pop(request_id, None)
        self.acceptance.forget(request_id)
        if self._costs is not None:
            self._costs.forget(request_id)
        self._proposer.forget(request_id)
