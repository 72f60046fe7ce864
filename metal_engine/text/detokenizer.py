"""Converts token ids to text, one token at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from typing import Any

from tokenizers.decoders import DecodeStream

logger = logging.getLogger(__name__)

# Number of prompt tokens that the decoder processes first, so that the first new token is decoded in context: its
# leading space depends on the token before it.
_CONTEXT_TOKENS = 4
# A character has at most four bytes, so a prompt can end with at most three tokens of an incomplete character.
_MAX_INCOMPLETE_TOKENS = 3
# Maximum number of tokens whose text is held back. More tokens are invalid bytes.
_MAX_HELD_TOKENS = 32

_INCOMPLETE = "\ufffd"  # output of a decoder for bytes that are not a whole character


class Detokenizer:
    """Decodes the token ids of one output to text, one token at a time.

    Returns each character as soon as it is complete, and holds back the bytes of an incomplete character.

    Args:
        backend: tokenizer of the ``tokenizers`` library.
        prompt_token_ids: tokens before the first new token, as context. Their text is not returned.
        skipped: ids of the special tokens, to leave them out of the text. Empty to include them.
    """

    def __init__(self, backend: Any, prompt_token_ids: Sequence[int], skipped: Set[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._skip_special_tokens = bool(skipped)
        # Last tokens whose text the stream has returned, and later tokens whose text the stream holds back.
        self._context: tuple[int, ...] = ()
        self._held: list[int] = []
        self._shown = ""  # whole characters of the held tokens' text, which have been returned
        # A stream whose context ends within a character would repeat the whole context with the first new text.
        # Therefore the context ends before an incomplete character, and the remaining prompt tokens are added like new
        # tokens.
        end = self._end_of_text(prompt_token_ids)
        context = tuple(prompt_token_ids[max(end - _CONTEXT_TOKENS, 0) : end])
        if not self._decode(context).endswith(_INCOMPLETE):
            self._context, context = context, ()
        self._stream = self._new_stream()
        for token_id in (*context, *prompt_token_ids[end:]):
            self.add(token_id)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=list(self._context), skip_special_tokens=self._skip_special_tokens)

    def _end_of_text(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading tokens whose text ends with a whole character."""
        shortest = max(len(token_ids) - _MAX_INCOMPLETE_TOKENS, 0)
        for end in range(len(token_ids), shortest, -1):
            if not self._decode(token_ids[max(end - _CONTEXT_TOKENS, 0) : end]).endswith(_INCOMPLETE):
                return end
        return shortest

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)
        return text

    def add(self, token_id: int) -> str:
        """Return the whole characters that ``token_id`` completes; an empty string if it completes none."""
        if token_id in self._skipped:  # the stream would decode the skipped token again in each later step
            return ""
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception as error:  # noqa: BLE001  (tokenizers raises a bare Exception from Rust)
            # Seen upstream with ids that decode differently once more context is there. The stream cannot continue from
            # its own state, so decoding restarts at this token. At most one character is wrong.
            logger.warning("detokenizer restarted at token %d: %s", token_id, error)
            self._context, self._held, self._shown = (), [], ""
            self._stream = self._new_stream()
            text = self._stream.step(self._backend, token_id)
        if not text:
            return self._whole_characters(token_id)
        if self._held:
            text = text[len(self._shown) :]
            self._held, self._shown = [], ""
        self._context = (token_id,)
        return text

    def _whole_characters(self, token_id: int) -> str:
        """Return the new whole characters after a token for which the stream has returned no text.

        The stream holds back all text while the last character is incomplete.
        """
        self._held.append(token_id)
        whole, incomplete = self._held_text()
        new, self._shown = whole[len(self._shown) :], max(self._shown, whole, key=len)
        if len(self._held) <= _MAX_HELD_TOKENS:
            return new
        # Return the replacement characters of invalid bytes. The last bytes may still become a character.
        last = self._held[-_MAX_INCOMPLETE_TOKENS:]
        self._held, self._shown, self._stream = [], "", self._new_stream()
        for token_id in last:
            self.add(token_id)
        return new + incomplete[len(self._held_text()[1]) :]

    def _held_text(self) -> tuple[str, str]:
        """Return the whole characters of the held tokens' text, and the replacement characters after them."""
        before, text = self._decode(self._context), self._decode((*self._context, *self._held))
        # The text of earlier tokens may change until a character is complete.
        whole = text[len(before) :].rstrip(_INCOMPLETE) if text.startswith(before) else ""
        return whole, text[len(before) + len(whole) :]
