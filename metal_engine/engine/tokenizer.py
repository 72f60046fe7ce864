"""The tokenizer as the engine uses it: text to ids, ids to text one token at a time, chat templates."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

# On import transformers advises to install torch, which is of no use here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


class Tokenizer:
    """A fast Hugging Face tokenizer with the model's end-of-sequence ids.

    Args:
        hf_tokenizer: from ``transformers``; must be a fast one, since text is decoded incrementally.
        eos_token_ids: every id that ends generation, from the checkpoint's configuration.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast, eos_token_ids: Iterable[int] = ()) -> None:
        self._hf = hf_tokenizer
        own = hf_tokenizer.eos_token_id
        self.eos_token_ids = frozenset(eos_token_ids) | ({own} if own is not None else set())

    @property
    def hf_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of ``transformers``."""
        return self._hf

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def template_takes_tools(self) -> bool:
        """Whether the chat template does anything with tools."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            return "tool_use" in template or any("tools" in text for text in template.values())
        return "tools" in (template or "")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the ids the tokenizer puts around a raw prompt (BOS) unless told not to."""
        try:
            # Not verbose: the tokenizer would warn of long texts, which are refused later, with a message of our own.
            return self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except TypeError as error:  # what the tokenizer makes of lone surrogates
            raise ValueError("the text is not valid Unicode") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token; empty for an id that it does not have."""
        return [self._hf.convert_ids_to_tokens(i) or "" for i in token_ids]

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError("the model has no chat template; use /v1/completions with a plain prompt")
        template_kwargs.setdefault("add_generation_prompt", True)
        try:
            text = self._hf.apply_chat_template(messages, tokenize=False, **template_kwargs)
        except Exception as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        # The template writes its own BOS, so none is added here.
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self._hf.backend_tokenizer, prompt_token_ids, skip_special_tokens)


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
            ids=list(prompt_token_ids[max(end - _CONTEXT_TOKENS, 0) : end]),
            skip_special_tokens=skip_special_tokens,
        )
        for token_id in prompt_token_ids[end:]:
            self.add(token_id)

    def _end_of_text(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens make whole characters."""
        for end in range(len(token_ids), max(len(token_ids) - _MAX_INCOMPLETE_TOKENS, 0), -1):
            context = list(token_ids[max(end - _CONTEXT_TOKENS, 0) : end])
            text = self._backend.decode(context, skip_special_tokens=self._skip_special_tokens)
            if not text.endswith("\ufffd"):
                return end
        return max(len(token_ids) - _MAX_INCOMPLETE_TOKENS, 0)

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
