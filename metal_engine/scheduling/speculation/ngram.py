"""Proposes what comes next from what came before: where the last tokens stood earlier, the tokens that followed them.

Each request has an index of its tokens, which grows with them; no step scans a sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from metal_engine.request import Request
from metal_engine.settings.config import SpeculativeConfig

# Earlier places that one proposal looks at, the latest first: 20 µs at most.
MAX_CANDIDATES = 32
# Tokens that are indexed in a step, of all requests together: some 8 ms.
TOKENS_PER_STEP = 8192
_MIN_BUCKETS, _MAX_BUCKETS = 1 << 10, 1 << 20


class NgramIndex:
    """Finds where the last tokens of a sequence stood before.

    A *place* p stands for the tokens right before it, and for token p that followed them. Places whose last
    ``min_tokens`` tokens fall into one bucket are a chain, the latest first::

        heads[bucket] -> p -> earlier[p - min_tokens] -> ... -> -1

    Takes 4 bytes for each token and for each bucket.

    Args:
        min_tokens: tokens that must agree.
        max_tokens: tokens that are compared.
        num_tokens: of the sequence; when it has twice as many it outgrows the index, whose chains get long.
    """

    def __init__(self, min_tokens: int, max_tokens: int, num_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        num_buckets = min(max(1 << num_tokens.bit_length(), _MIN_BUCKETS), _MAX_BUCKETS)
        self._mask = num_buckets - 1
        self._heads = array("i", [-1]) * num_buckets
        self._earlier = array("i")

    def _bucket(self, token_ids: list[int], place: int) -> int:
        return hash(tuple(token_ids[place - self._min_tokens : place])) & self._mask

    @property
    def is_outgrown(self) -> bool:
        return len(self._heads) < _MAX_BUCKETS and len(self._earlier) > len(self._heads)

    def num_missing(self, token_ids: list[int]) -> int:
        """Returns how many places of the sequence are not indexed yet."""
        return max(0, len(token_ids) - self._min_tokens - len(self._earlier))

    def extend(self, token_ids: list[int], num_places: int) -> None:
        """Index the next ``num_places`` places of the sequence, or as many as it has."""
        first = len(self._earlier) + self._min_tokens
        for place in range(first, min(first + num_places, len(token_ids))):
            bucket = self._bucket(token_ids, place)
            self._earlier.append(self._heads[bucket])
            self._heads[bucket] = place

    def find(self, token_ids: list[int], last: list[int]) -> int | None:
        """Returns the place where most of the tokens at the end of ``last`` stand, and of several such the latest.

        None if there is none. Only the latest ``MAX_CANDIDATES`` places of the bucket are looked at.

        Args:
            token_ids: the sequence.
            last: the same, or another one.
        """
        end = len(last)
        if end < self._min_tokens:
            return None
        best, longest = None, self._min_tokens - 1
        place = self._heads[self._bucket(last, end)]
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            length = self._num_common(token_ids, place, last)
            if length > longest:
                best, longest = place, length
                if length == self._max_tokens:
                    break
            place = self._earlier[place - self._min_tokens]
        return best

    def _num_common(self, token_ids: list[int], place: int, last: list[int]) -> int:
        """Returns how many tokens before ``place`` are those at the end of ``last``, ``max_tokens`` at most."""
        end = len(last)
        most = min(self._max_tokens, place, end)
        length = 0
        while length < most and token_ids[place - 1 - length] == last[end - 1 - length]:
            length += 1
        return length

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Returns the ``num_tokens`` tokens that followed the last ones before; none if they are new.

        A copy that reaches the end of the sequence goes on with what it has copied, as in a loop.
        """
        place = self.find(token_ids, token_ids)
        if place is None:
            return []
        drafts = token_ids[place : place + num_tokens]
        for i in range(num_tokens - len(drafts)):
            drafts.append(drafts[i])
        return drafts


class PredictedText:
    """Where a request is in the text that its client expects: there, until another token comes; then where that stands.

    Args:
        token_ids: the text.
        num_prompt_tokens: of the request, whose output is expected to begin with the text.
    """

    def __init__(self, token_ids: Sequence[int], config: SpeculativeConfig, num_prompt_tokens: int) -> None:
        self._token_ids = list(token_ids)
        self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max, len(token_ids))
        self._place: int | None = 0  # of what comes after the tokens seen
        self._num_seen = num_prompt_tokens

    def index(self, num_places: int) -> int:
        """Index so many places of the text, if there are so many left; returns how many."""
        num_missing = min(num_places, self._index.num_missing(self._token_ids))
        self._index.extend(self._token_ids, num_missing)
        return num_missing

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Returns the next ``num_tokens`` tokens of the text; none where the request's tokens have left it."""
        new, self._num_seen = token_ids[self._num_seen :], len(token_ids)
        if self._place is not None and self._token_ids[self._place : self._place + len(new)] == new:
            self._place += len(new)
        else:
            self._place = self._index.find(self._token_ids, token_ids)
        return [] if self._place is None else self._token_ids[self._place : self._place + num_tokens]


class PredictedTexts:
    """Drafts of the texts that requests' clients expect, as long as the requests follow them."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._predictions: dict[str, PredictedText] = {}
        self._followed: set[str] = set()  # requests whose last proposal came from there

    def propose(self, request: Request, num_tokens: int, room: int) -> tuple[list[int], int]:
        """Returns drafts, and how many places of the text were indexed, ``room`` at most."""
        if not request.options.predicted_token_ids:
            return [], 0
        prediction = self._predictions.get(request.request_id)
        if prediction is None:
            text = request.options.predicted_token_ids
            prediction = PredictedText(text, self._config, request.num_prompt_tokens)
            self._predictions[request.request_id] = prediction
        num_indexed = prediction.index(room)
        drafts = prediction.propose(request.token_ids, num_tokens)
        if drafts:
            self._followed.add(request.request_id)
        else:
            self._followed.discard(request.request_id)
        return drafts, num_indexed

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count what became of the last proposal, if it was of a prediction."""
        if request.request_id in self._followed:
            accepted, rejected = request.num_predicted_tokens
            request.num_predicted_tokens = accepted + num_accepted, rejected + num_drafts - num_accepted

    def forget(self, request_id: str) -> None:
        self._predictions.pop(request_id, None)
        self._followed.discard(request_id)


class NgramProposer:
    """Drafts for all requests (:class:`metal_engine.scheduling.speculation.speculation.Proposer`).

    They are of the text that a request's client expects, as long as the request follows one.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indexes: dict[str, NgramIndex] = {}
        self._predictions = PredictedTexts(config)
        self._room = 0

    def begin_step(self) -> None:
        self._room = TOKENS_PER_STEP

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        drafts, num_indexed = self._predictions.propose(request, num_tokens, self._room)
        self._room -= num_indexed
        return drafts or self._repeated(request, num_tokens)

    def _repeated(self, request: Request, num_tokens: int) -> list[int]:
        index = self._indexes.get(request.request_id)
        if index is None or index.is_outgrown:
            config = self._config
            index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max, request.num_tokens)
            self._indexes[request.request_id] = index
        num_missing = index.num_missing(request.token_ids)
        index.extend(request.token_ids, self._room)
        self._room -= min(num_missing, self._room)
        if index.num_missing(request.token_ids):
            return []  # the rest of a long prompt is indexed with the next steps
        return index.propose(request.token_ids, num_tokens)

    def settled(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._predictions.settled(request, num_drafts, num_accepted)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
        self._predictions.forget(request_id)
