"""Estimates how likely drafts are to be accepted, from the results of earlier drafts."""

from __future__ import annotations

from collections.abc import Sequence

from metal_engine.step import UNKNOWN_DRAFT

# Weight of one draft's result in the estimated acceptance of its request, and its weight in the estimate for new
# requests.
_DRAFT_WEIGHT = 0.2
_SHARED_WEIGHT = 0.02
# Initial value of both estimates.
_FIRST_GUESS = 0.7


class Acceptance:
    """Estimated probability that a request's next draft is accepted if its earlier drafts are.

    There is an estimate for each request with results. All other requests share one estimate.

    Args:
        first_guess: initial value of the estimates.
    """

    def __init__(self, first_guess: float = _FIRST_GUESS) -> None:
        self._shared = first_guess
        self._of_request: dict[str, float] = {}

    def of(self, request_id: str) -> float:
        return self._of_request.get(request_id, self._shared)

    def tried(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Update the estimates after the first ``num_accepted`` of a request's ``num_drafts`` drafts were accepted.

        Drafts after the first rejected draft carry no information.
        """
        probability = self.of(request_id)
        for i in range(min(num_drafts, num_accepted + 1)):
            is_right = float(i < num_accepted)
            probability += _DRAFT_WEIGHT * (is_right - probability)
            self._shared += _SHARED_WEIGHT * (is_right - self._shared)
        self._of_request[request_id] = probability

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)


class SourceAcceptance:
    """Estimated acceptance of the drafts of a proposer, by source.

    Args:
        head_guess: initial value for drafts that a draft head fills in. None if all drafts share one estimate.

    Attributes:
        lookups: acceptance of drafts with tokens from prompt lookup or from a predicted text.
        computed: acceptance of drafts that the runner computes (:data:`UNKNOWN_DRAFT`). The same object as ``lookups``
            if ``head_guess`` is None.
    """

    def __init__(self, head_guess: float | None = None) -> None:
        self.lookups = Acceptance()
        self.computed = self.lookups if head_guess is None else Acceptance(head_guess)

    @property
    def is_shared(self) -> bool:
        """True if ``lookups`` and ``computed`` are the same object."""
        return self.lookups is self.computed

    def of_source(self, drafts: Sequence[int]) -> Acceptance:
        """Return the acceptance of the source of ``drafts``, which must not be empty."""
        return self.computed if drafts[0] == UNKNOWN_DRAFT else self.lookups

    def of(self, request_id: str, drafts: Sequence[int]) -> float:
        """Return the estimated acceptance of a request's drafts."""
        return self.of_source(drafts).of(request_id)

    def best_of(self, request_id: str) -> float:
        """Return the higher of a request's two estimates: for looked-up drafts and for computed drafts."""
        return max(self.lookups.of(request_id), self.computed.of(request_id))

    def forget(self, request_id: str) -> None:
        """Drop the data of a request that has ended."""
        self.lookups.forget(request_id)
        self.computed.forget(request_id)
