"""Prompt lookup: finds an earlier occurrence of a request's last tokens, and proposes the tokens that followed it.

Each request has an index of its tokens, which grows with the tokens. No step scans a whole sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

from metal_engine.request import Request
from metal_engine.scheduling.speculation.acceptance import SourceAcceptance
from metal_engine.settings.config import SpeculativeConfig

# Maximum number of earlier occurrences that one proposal compares, latest first. Takes at most 20 µs.
MAX_CANDIDATES = 32
# Maximum number of tokens indexed in a step, over all requests. Takes about 8 ms.
TOKENS_PER_STEP = 8192
_MIN_BUCKETS, _MAX_BUCKETS = 1 << 10, 1 << 20


class NgramIndex:
    """Index of a sequence that finds earlier occurrences of its last tokens.

    A *place* p is a position in the sequence. It stands for an occurrence of the tokens right before p, which was
    followed by token p. Places whose preceding ``min_tokens`` tokens hash to the same bucket form a chain, latest
    first::

        heads[bucket] -> p -> earlier[p - min_tokens] -> ... -> -1

    Takes 4 bytes for each token and for each bucket.

    Args:
        min_tokens: number of tokens that must match.
        max_tokens: maximum number of tokens to compare.
        num_tokens: current length of the sequence. The number of buckets is the next power of two, between
            ``_MIN_BUCKETS`` and ``_MAX_BUCKETS``. With more places than buckets, the index is outgrown: its
            chains get long, and the caller should create a new index. An index of ``_MAX_BUCKETS`` is never outgrown.
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
        """Return how many places of the sequence are not indexed yet."""
        return max(0, len(token_ids) - self._min_tokens - len(self._earlier))

    def extend(self, token_ids: list[int], num_places: int) -> None:
        """Index the next ``num_places`` places of the sequence, or all remaining places if there are fewer."""
        first = len(self._earlier) + self._min_tokens
        for place in range(first, min(first + num_places, len(token_ids))):
            bucket = self._bucket(token_ids, place)
            self._earlier.append(self._heads[bucket])
            self._heads[bucket] = place

    def find(self, token_ids: list[int], last: list[int]) -> int | None:
        """Return the place with the longest match for the tokens at the end of ``last``.

        Of equally long matches, the latest place is returned. None if no match has ``min_tokens`` tokens. Compares only
        the latest ``MAX_CANDIDATES`` places of the bucket.

        Args:
            token_ids: the indexed sequence.
            last: sequence whose end is looked up; may be ``token_ids`` itself.
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
        """Return how many tokens before ``place`` match the end of ``last``, at most ``max_tokens``."""
        end = len(last)
        most = min(self._max_tokens, place, end)
        length = 0
        while length < most and token_ids[place - 1 - length] == last[end - 1 - length]:
            length += 1
        return length

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Return the ``num_tokens`` tokens that followed an earlier occurrence of the sequence's last tokens.

        Empty if there is no earlier occurrence. If the copied tokens reach the end of the sequence, the copy repeats
        from its start, e.g. ``[7, 8, 7, 8]``.
        """
        place = self.find(token_ids, token_ids)
        if place is None:
            return []
        drafts = token_ids[place : place + num_tokens]
        for i in range(num_tokens - len(drafts)):
            drafts.append(drafts[i])
        return drafts


class PredictedText:
    """Position of a request in the text that its client predicts.

    The position starts at the beginning of the text, and advances with the output until the request generates a
    different token. Then the request's last tokens are looked up in the text.

    Args:
        token_ids: the predicted text.
        num_prompt_tokens: length of the request's prompt. The output is expected to begin with the text.
    """

    def __init__(self, token_ids: Sequence[int], config: SpeculativeConfig, num_prompt_tokens: int) -> None:
        self._token_ids = list(token_ids)
        self._index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max, len(token_ids))
        self._place: int | None = 0  # place of the next expected token
        self._num_seen = num_prompt_tokens

    def index(self, num_places: int) -> int:
        """Index up to ``num_places`` more places of the text. Return how many places were indexed."""
        num_missing = min(num_places, self._index.num_missing(self._token_ids))
        self._index.extend(self._token_ids, num_missing)
        return num_missing

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Return up to ``num_tokens`` tokens of the text that may come next.

        Empty at the end of the text, or if the text lacks the request's last tokens.

        Args:
            token_ids: all tokens of the request, including its prompt: the list of the previous call, extended.
        """
        new, self._num_seen = token_ids[self._num_seen :], len(token_ids)
        if self._place is not None and self._token_ids[self._place : self._place + len(new)] == new:
            self._place += len(new)
        else:
            self._place = self._index.find(self._token_ids, token_ids)
        return [] if self._place is None else self._token_ids[self._place : self._place + num_tokens]


class PredictedTextProposer(ABC):
    """Base class of proposers (:class:`metal_engine.scheduling.speculation.proposals.Proposer`).

    While a request follows the text that its client has predicted, the drafts come from that text.

    Attributes:
        acceptance: see :class:`metal_engine.scheduling.speculation.proposals.Proposer`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.acceptance = SourceAcceptance()
        self._config = config
        self._predicted_texts: dict[str, PredictedText] = {}
        self._followed: set[str] = set()  # requests whose last proposal came from their predicted text
        self._index_budget = 0  # number of tokens that may still be indexed in this step

    def begin_step(self) -> None:
        self._index_budget = TOKENS_PER_STEP

    def propose(self, request: Request, num_tokens: int) -> list[int]:
        return self._from_predicted_text(request, num_tokens) or self._from_elsewhere(request, num_tokens)

    @abstractmethod
    def _from_elsewhere(self, request: Request, num_tokens: int) -> list[int]:
        """Return drafts for a request that does not follow a predicted text."""

    def _from_predicted_text(self, request: Request, num_tokens: int) -> list[int]:
        if not request.options.predicted_token_ids:
            return []
        predicted = self._predicted_texts.get(request.request_id)
        if predicted is None:
            text = request.options.predicted_token_ids
            predicted = PredictedText(text, self._config, request.num_prompt_tokens)
            self._predicted_texts[request.request_id] = predicted
        self._index_budget -= predicted.index(self._index_budget)
        drafts = predicted.propose(request.token_ids, num_tokens)
        if drafts:
            self._followed.add(request.request_id)
        else:
            self._followed.discard(request.request_id)
        return drafts

    def record_result(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Add the result to ``request.num_predicted_tokens`` if the last proposal came from a predicted text."""
        if request.request_id in self._followed:
            accepted, rejected = request.num_predicted_tokens
            request.num_predicted_tokens = accepted + num_accepted, rejected + num_drafts - num_accepted

    def forget(self, request_id: str) -> None:
        self._predicted_texts.pop(request_id, None)
        self._followed.discard(request_id)


class NgramProposer(PredictedTextProposer):
    """Proposer of drafts from a predicted text, or by prompt lookup if the request follows no predicted text.

    A lookup proposes nothing until all tokens of the request are indexed. A step indexes at most ``TOKENS_PER_STEP``
    tokens of all requests together.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._indexes: dict[str, NgramIndex] = {}

    def _from_elsewhere(self, request: Request, num_tokens: int) -> list[int]:
        index = self._indexes.get(request.request_id)
        if index is None or index.is_outgrown:
            config = self._config
            index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max, request.num_tokens)
            self._indexes[request.request_id] = index
        num_missing = index.num_missing(request.token_ids)
        index.extend(request.token_ids, self._index_budget)
        self._index_budget -= min(num_missing, self._index_budget)
        if index.num_missing(request.token_ids):
            return []  # the remaining tokens of a long prompt are indexed in the next steps
        return index.propose(request.token_ids, num_tokens)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._indexes.pop(request_id, None)
