"""Token ids to text, one token at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

logger = logging.getLogger(__name__)

# Tokens of the prompt that the decoder sees first, so that the first new token is decoded in context (a
# leading space depends on it).
_CONTEXT_TOKENS = 4
# A character is at most four bytes, so at most three of its tokens can end a prompt.
_MAX_INCOMPLETE_TOKENS = 3


class Detokenizer:
    """Token ids to text, one token at a time; holds back bytes that do not make a whole character yet."""

    def __init__(self, backend: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        # A decoder whose context ends within a character would repeat the whole context with the first new
        # text. So the context ends before that character, and its tokens follow as if they were new.
        end = self._end_of_text(prompt_token_ids)
        self._stream = DecodeStream(
            ids=list(prompt_token_ids[max(end - _CONTEXT_TOKENS, 0) : end]), skip_special_tokens=skip_special_tokens
        )
        for token_id in prompt_token_ids[end:]:
            self.add(token_id)

    def _end_of_text(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens make whole characters."""
        shortest = max(len(token_ids) - _MAX_INCOMPLETE_TOKENS, 0)
        for end in range(len(token_ids), shortest, -1):
            context = list(token_ids[max(end - _CONTEXT_TOKENS, 0) : end])
            text = self._backend.decode(context, skip_special_tokens=self._skip_special_tokens)
            if not text.endswith("\ufffd"):
                return end
        return shortest

    def add(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception as error:  # noqa: BLE001  (tokenizers raises a bare Exception from Rust)
            # Seen upstream with ids that decode differently once more context is there. The stream cannot go
            # on from its own state, so it starts over at this token; at most one character is misjudged.
            logger.warning("detokenizer restarted at token %d: %s", token_id, error)
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._backend, token_id) or ""
