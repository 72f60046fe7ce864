"""Proposes what comes next from what came before: where the last tokens stood earlier, the tokens that followed them.

Each request has an index of its tokens, which grows with them; no step scans a sequence.
"""

from __future__ import annotations

from array import array

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

    def find(self, token_ids: list[int]) -> int | None:
        """Returns the place where most of the last tokens stood before, and of several such the latest; None if none.

        Only the latest ``MAX_CANDIDATES`` places of the bucket are looked at.
        """
        end = len(token_ids)
        if end < self._min_tokens:
            return None
        best, longest = None, self._min_tokens - 1
        place = self._heads[self._bucket(token_ids, end)]
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            length = self._num_common(token_ids, place)
            if length > longest:
                best, longest = place, length
                if length == self._max_tokens:
                    break
            place = self._earlier[place - self._min_tokens]
        return best

    def _num_common(self, token_ids: list[int], place: int) -> int:
        """Returns how many tokens before ``place`` are those at the end, ``max_tokens`` at most."""
        end = len(token_ids)
        length = 0
        while length < min(self._max_tokens, place) and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Returns the ``num_tokens`` tokens that followed the last ones before; none if they are new.

        A copy that reaches the end of the sequence goes on with what it has copied, as in a loop.
        """
        place = self.find(token_ids)
        if place is None:
            return []
        drafts = token_ids[place : place + num_tokens]
        for i in range(num_tokens - len(drafts)):
            drafts.append(drafts[i])
        return drafts


class NgramProposer:
    """Drafts for all requests (:class:`metal_engine.scheduling.speculation.Proposer`)."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indexes: dict[str, NgramIndex] = {}
        self._room = 0

    def begin_step(self) -> None:
        self._room = TOKENS_PER_STEP

    def propose(self, request: Request, num_tokens: int) -> list[int]:
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

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
