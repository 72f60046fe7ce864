"""The tokenizer as the engine uses it: text to ids, ids to text one token at a time, chat templates."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from tokenizers.decoders import DecodeStream

# On import transformers advises to install torch, which is of no use here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


# How tokenizers without a byte alphabet spell a byte that is no character.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """The byte for each character of byte-level tokens (GPT-2): printable Latin-1 stands for itself."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()

# Characters that Unicode normalization makes one of, at most, as far as prompts go.
_SHRINKING = 4


class TextTooLongError(ValueError):
    """A text that cannot fit, whatever its tokens are."""


class Tokenizer:
    """A fast Hugging Face tokenizer with the model's end-of-sequence ids.

    Args:
        hf_tokenizer: from ``transformers``; must be a fast one, since text is decoded incrementally.
        eos_token_ids: every id that ends generation, from the checkpoint's configuration.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast, eos_token_ids: Iterable[int] = ()) -> None:
        self.hf_tokenizer = hf_tokenizer
        self._max_chars: int | None = None
        own = hf_tokenizer.eos_token_id
        self.eos_token_ids = frozenset(eos_token_ids) | ({own} if own is not None else set())
        self._token_bytes: dict[int, bytes] = {}

    @cached_property
    def serialized(self) -> bytes:
        """The tokenizer as Hugging Face's library writes it to ``tokenizer.json``.

        Takes 0.3 s for 150,000 tokens, in which no other thread runs: to be read before anybody is served.
        """
        backend = self.hf_tokenizer.backend_tokenizer
        if backend.padding is not None or backend.truncation is not None:
            backend = copy(backend)
            backend.no_padding()
            backend.no_truncation()
        return backend.to_str().encode()

    @property
    def template_takes_tools(self) -> bool:
        """Whether the chat template does anything with tools."""
        return "tool_use" in self._templates or any("tools" in text for text in self._templates.values())

    def limited(self, max_tokens: int) -> Tokenizer:
        """The same tokenizer, but it refuses texts that cannot be ``max_tokens`` or fewer, before it spends half a
        minute on them (:class:`TextTooLongError`)."""
        limited = copy(self)
        limited._max_chars = _SHRINKING * self._longest_token * max_tokens
        return limited

    @cached_property
    def _longest_token(self) -> int:
        """Length of the vocabulary's longest token, in characters."""
        return max(map(len, self.hf_tokenizer.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the ids the tokenizer puts around a raw prompt (BOS) unless told not to.

        Raises:
            ValueError: it is no text, or (:class:`TextTooLongError`) too long for a :meth:`limited` tokenizer.
        """
        if self._max_chars is not None and len(text) > self._max_chars:
            raise TextTooLongError(
                f"a prompt of {len(text)} characters is far longer than the maximum context length of the model"
            )
        try:
            # Not verbose: the tokenizer would warn of long texts, which are refused later, with a message of our own.
            return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except TypeError as error:  # what the tokenizer makes of lone surrogates
            raise ValueError("the text is not valid Unicode") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.hf_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out of the text."""
        added = self.hf_tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in UTF-8: maybe part of a character; nothing for an id that is no token."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self.hf_tokenizer.convert_ids_to_tokens(token_id)
            is_added = token_id in self.hf_tokenizer.added_tokens_decoder
            found = b"" if token is None else token.encode() if is_added else self._spelled_bytes(token)
            self._token_bytes[token_id] = found
        return found

    def _spelled_bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            return bytes(_BYTE_OF_CHAR[ch] for ch in token if ch in _BYTE_OF_CHAR)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        return b'"ByteLevel"' in self.hf_tokenizer.backend_tokenizer.decoder.__getstate__()

    def template_mentions(self, name: str) -> bool:
        """Whether the chat template has a variable of that name."""
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self._templates.values())

    @property
    def _templates(self) -> dict[str, str]:
        """The chat templates by name."""
        template = self.hf_tokenizer.chat_template
        return template if isinstance(template, dict) else {"default": template or ""}

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token; empty for an id that it does not have."""
        return [self.hf_tokenizer.convert_ids_to_tokens(i) or "" for i in token_ids]

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if not self.hf_tokenizer.chat_template:
            raise ValueError("the model has no chat template; use /v1/completions with a plain prompt")
        template_kwargs.setdefault("add_generation_prompt", True)
        try:
            text = self.hf_tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)
        except Exception as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        # The template writes its own BOS, so none is added here.
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self.hf_tokenizer.backend_tokenizer, prompt_token_ids, skip_special_tokens)


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
