"""Which of an answer's tokens are reasoning."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from metal_engine.answers.pieces import Splitter
from metal_engine.engine.tokenizer import Tokenizer


class ReasoningCounter:
    """Counts tokens of reasoning, its marks included: one by one, for a client's events may have several.

    Args:
        splitter: for one answer's text, and nothing else.

    Attributes:
        count: those so far.
    """

    def __init__(self, splitter: Splitter, tokenizer: Tokenizer) -> None:
        self.count = 0
        self._splitter = splitter
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id in self._tokenizer.eos_token_ids:
                continue
            was = self._splitter.in_reasoning
            self._splitter.add(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            self.count += was or self._splitter.in_reasoning
