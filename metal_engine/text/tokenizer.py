"""Tokenizer of a model: text to ids, ids to text one token at a time, and chat templates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from metal_engine.json_values import parts
from metal_engine.text import chat_template
from metal_engine.text.content_parts import as_parts
from metal_engine.text.control_tokens import ControlTokens
from metal_engine.text.detokenizer import Detokenizer
from metal_engine.text.infilling import Infilling
from metal_engine.text.long_text import TextTooLongError, encode, limit_word_cache, special_token_affixes
from metal_engine.text.message_rules import MessageRules, with_content_as_thinking, with_short_ids

# Spelling of a single byte in tokenizers without a byte alphabet.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """Map each character of byte-level tokens (GPT-2) to its byte. Printable Latin-1 characters map to themselves."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()

# A text of more than ``_MAX_CHARACTERS`` is refused if it also has more than ``_CHARACTERS_PER_TOKEN`` characters for
# each allowed token. Every operation on such a text takes long.
_MAX_CHARACTERS = 1 << 22
_CHARACTERS_PER_TOKEN = 8

# Minimum length of a text that is counted only once if it occurs under several names.
_LONG = 1 << 10

# A character that is always a separate token. Text encoded after it is not at the start of a text.
_WITHIN = "\u263a"

# Maximum number of characters that Unicode normalization combines into one, in practice.
_SHRINKING = 4


class Tokenizer:
    """Fast Hugging Face tokenizer with the model's end-of-sequence ids.

    Args:
        hf_tokenizer: tokenizer from ``transformers``. Must be a fast one, since text is decoded incrementally.
        eos_token_ids: all ids that end generation, from the checkpoint's configuration.
        allow_special_tokens_in_content: True to encode control tokens that are spelled out in a conversation's texts as
            control tokens. By default, they are encoded as plain text.
    """

    def __init__(
        self,
        hf_tokenizer: PreTrainedTokenizerFast,
        eos_token_ids: Iterable[int] = (),
        *,
        allow_special_tokens_in_content: bool = False,
    ) -> None:
        self.hf_tokenizer = hf_tokenizer
        self._allow_special_tokens = allow_special_tokens_in_content
        self._max_tokens: int | None = None
        self._context_length: int | None = None
        self._max_chars: int | None = None
        own = hf_tokenizer.eos_token_id
        self.eos_token_ids = frozenset(eos_token_ids) | ({own} if own is not None else set())
        self._token_bytes: dict[int, bytes] = {}

        backend = hf_tokenizer.backend_tokenizer
        # Prompts are encoded whole and one at a time.
        backend.no_truncation()
        backend.no_padding()
        limit_word_cache(backend.model)
        self._control_tokens = ControlTokens(backend, self._templates.values())
        # Shared by all copies, so that the template is tried only once.
        self.message_rules = MessageRules(lambda messages: self._rendered(messages, {"add_generation_prompt": True}))

    @cached_property
    def serialized(self) -> bytes:
        """Content of ``tokenizer.json`` as the Hugging Face library writes it.

        Takes 0.3 s for 150,000 tokens and holds the GIL. Read it before requests are served.
        """
        return self.hf_tokenizer.backend_tokenizer.to_str().encode()

    @property
    def template_takes_tools(self) -> bool:
        """True if the chat template supports tools."""
        return "tool_use" in self._templates or any("tools" in text for text in self._templates.values())

    def limited(self, max_tokens: int, context_length: int | None = None) -> Tokenizer:
        """Return a copy that refuses long texts of more than ``max_tokens`` tokens.

        The copy raises :class:`TextTooLongError` early, because encoding a long text completely could take half a
        minute. The copy does not refuse a text that is short enough for one call of the tokenizer: callers must check
        the number of its tokens.

        Args:
            context_length: context length for error messages, in tokens. Default: ``max_tokens``.
        """
        limited = copy(self)
        limited._max_tokens = max_tokens
        limited._context_length = max_tokens if context_length is None else context_length
        most = max(_MAX_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens)
        # Computed on the original, because each copy would scan the vocabulary again.
        limited._max_chars = min(_SHRINKING * self._longest_token * max_tokens, most)
        return limited

    @cached_property
    def _longest_token(self) -> int:
        """Length of the vocabulary's longest token, in characters."""
        return max(map(len, self.hf_tokenizer.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to token ids.

        Args:
            add_special_tokens: True to add the ids that the tokenizer puts around a raw prompt, such as BOS.

        Raises:
            ValueError: the text is not valid Unicode, or the tokenizer cannot tokenize it.
            TextTooLongError: the text is too long, for example for a :meth:`limited` tokenizer.
            Cancelled: the request was cancelled.
        """
        return self._encode(self.hf_tokenizer.backend_tokenizer, text, add_special_tokens)

    def _encode(self, backend: BackendTokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
        if self._max_chars is not None and len(text) > self._max_chars:
            raise self._too_long(len(text))
        try:
            return encode(backend, text, add_special_tokens=add_special_tokens, max_tokens=self._max_tokens)
        except TextTooLongError as error:
            raise self._too_long(len(text)) from error
        except TypeError as error:  # raised for lone surrogates
            raise ValueError("the text is not valid Unicode") from error

    def _too_long(self, num_characters: int | None = None, name: str | None = None) -> TextTooLongError:
        return TextTooLongError(num_characters, name, self._context_length)

    @cached_property
    def infilling(self) -> Infilling | None:
        """Infilling (fill in the middle) tokens; None if the tokenizer does not support infilling."""
        return Infilling.of(self.hf_tokenizer.backend_tokenizer)

    def encode_infilling(self, prefix: str | list[int], suffix: list[int]) -> tuple[list[int], slice]:
        """Encode a prompt that asks for the text between a prefix and a suffix.

        Only for a tokenizer with :attr:`infilling`.

        Args:
            prefix: text before the gap. Token ids are used as they are, without BOS.
            suffix: token ids of the text after the gap, from :meth:`encode_within`.

        Returns:
            Token ids of the prompt, and the positions of the prefix among them.

        Raises:
            ValueError: the prefix cannot be encoded, as in :meth:`encode`.
        """
        assert self.infilling is not None
        if not isinstance(prefix, str):
            return self.infilling.join(prefix, suffix)
        ids, place = self.infilling.join(self.encode(prefix, add_special_tokens=False), suffix)
        before, after = special_token_affixes(self.hf_tokenizer.backend_tokenizer)
        return [*before, *ids, *after], slice(len(before) + place.start, len(before) + place.stop)

    def encode_within(self, text: str) -> list[int]:
        """Encode a text that follows other text, without the space that some tokenizers add at the start of a text.

        Raises:
            ValueError: the text cannot be encoded, as in :meth:`encode`.
        """
        (start,) = self.tokens(self.encode("a", add_special_tokens=False)[:1])
        if not start.startswith(("\u2581", "\u0120")):
            return self.encode(text, add_special_tokens=False)
        before = len(self.encode(_WITHIN, add_special_tokens=False))
        return self.encode(_WITHIN + text, add_special_tokens=False)[before:]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        # The batch function releases the GIL.
        (text,) = self.hf_tokenizer.backend_tokenizer.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return text

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` removes from the text."""
        added = self.hf_tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def special_token_texts(self) -> dict[str, int]:
        """Ids of the tokens that grammars treat as special, by their texts.

        They include all added tokens in angle brackets, as in llguidance. Many tokenizers declare such tokens, for
        example ``<tool_call>`` and ``</think>``, as not special.
        """
        added = self.hf_tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text.

        The bytes may be an incomplete character. They are empty for an unknown id.
        """
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
        """Return True if the chat template's source contains the name as a word."""
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self._templates.values())

    @property
    def _templates(self) -> dict[str, str]:
        return chat_template.templates_of(self.hf_tokenizer)

    @cached_property
    def info(self) -> dict[str, Any]:
        """Data for clients that build prompts themselves, as in ``tokenizer_config.json``. Contains no file names."""
        hf = self.hf_tokenizer
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        template = self._templates.get("default") or next(iter(self._templates.values()), None)
        added = {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in sorted(hf.added_tokens_decoder.items())
        }
        return {
            "tokenizer_class": type(hf).__name__,
            **dict.fromkeys(names),
            **hf.special_tokens_map,
            "chat_template": template or None,
            "added_tokens_decoder": added,
        }

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it; an empty string for an unknown id."""
        return [self.hf_tokenizer.convert_ids_to_tokens(i) or "" for i in token_ids]

    def apply_chat_template(self, messages: list[dict[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Render a conversation with the chat template, and encode it.

        Args:
            messages: messages of the conversation, in OpenAI's form.
            template_kwargs: variables of the chat template, such as ``tools``. With ``continue_final_message``, the
                prompt ends with the last message (see :func:`metal_engine.text.chat_template.render`).

        Returns:
            Token ids of the prompt. By default the prompt ends with the generation prompt.

        Raises:
            ValueError: the model has no chat template, the template refuses the messages, or the rendered text cannot
                be encoded.
            TextTooLongError: the conversation is too long, for example for a :meth:`limited` tokenizer.
            Exception: a function among the tools has no docstring or no type hints (``transformers``' errors).
            Cancelled: the request was cancelled.
        """
        if not self.hf_tokenizer.chat_template:
            raise ValueError("the model has no chat template; use /v1/completions with a plain prompt")
        template_kwargs.setdefault("add_generation_prompt", not template_kwargs.get("continue_final_message"))
        self._check_length({"messages": messages, **template_kwargs})
        try:
            given = with_content_as_thinking(chat_template.plain_messages(messages), self.message_rules)
            given = with_short_ids(given, self.message_rules)
            if self.template_mentions("type") and self.message_rules.needs_parts:
                given = [
                    {**one, "content": as_parts(one["content"])} if one.get("content") is not None else one
                    for one in given
                ]
            variables = chat_template.plain_variables(template_kwargs)
            # The template writes its own BOS, so none is added here.
            if self._allow_special_tokens:
                return self._encode(self.hf_tokenizer.backend_tokenizer, self._rendered(given, variables))
            return self._control_tokens.encode(given, variables, self._rendered, self._encode)
        except chat_template.RenderedTooLongError as error:
            raise self._too_long() from error
        except RecursionError as error:
            raise ValueError("the messages are nested too deep") from error

    def _check_length(self, arguments: dict[str, Any]) -> None:
        """Raise TextTooLongError if the texts of all arguments together are too long for a prompt.

        The check comes before the texts are processed. The template might leave out some of the texts, but each text is
        copied before the template runs, sometimes several times.
        """
        if self._max_chars is None:
            return
        left, seen = self._max_chars, set()
        for name, value in arguments.items():
            for one in parts([name, value]):
                if not isinstance(one, str):
                    continue
                if len(one) >= _LONG:  # a text under several names, such as a message's reasoning, counts once
                    if id(one) in seen:
                        continue
                    seen.add(id(one))
                left -= len(one)
                if left < 0:
                    raise self._too_long(name=name)

    def encode_filled(self, template: str, texts: dict[str, str]) -> list[int]:
        """Fill texts into a template and encode the result. Control tokens that are spelled in the texts stay text.

        Args:
            template: template for ``str.format``, e.g. ``Query: {query}``. Not a chat template.
            texts: text for each name in the template.

        Raises:
            ValueError: a text is not valid Unicode, or cannot be encoded.
            TextTooLongError: the texts are too long.
            Cancelled: the request was cancelled.
        """
        if self._max_chars is not None and sum(map(len, texts.values())) > self._max_chars:
            raise self._too_long()

        def render(messages: list[dict[str, Any]], _: dict[str, Any]) -> str:
            return template.format(**{message["role"]: message["content"] for message in messages})

        if self._allow_special_tokens:
            return self._encode(self.hf_tokenizer.backend_tokenizer, template.format(**texts))
        messages = [{"role": name, "content": text} for name, text in texts.items()]
        return self._control_tokens.encode(messages, {}, render, self._encode)

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        if self._has_own_rendering:
            return self._rendered_by_tokenizer(messages, variables)
        return chat_template.render(self.hf_tokenizer, messages, variables, self._max_chars)

    @property
    def _has_own_rendering(self) -> bool:
        """True if the tokenizer has its own rendering code (--trust-remote-code)."""
        return type(self.hf_tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template

    def _rendered_by_tokenizer(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self.hf_tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except Exception as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def detokenizer(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return Detokenizer(self.hf_tokenizer.backend_tokenizer, prompt_token_ids, skipped)
