"""Encodes long texts in pieces.

No call holds the GIL for long or takes much memory, and a text that is too long is detected before all of it is
encoded. A tokenizer needs up to 260 bytes of memory for each byte of text. Its batch functions release the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unicodedata import category

from tokenizers import models

from metal_engine.cancellation import check_cancelled
from metal_engine.errors import is_rust_panic, one_line

# Characters encoded in one call, for ASCII texts and other texts. A call takes 10 MiB or 33 MiB.
_AT_ONCE_ASCII = 1 << 17
_AT_ONCE = 1 << 15
# Limit for encoding a text without a place to cut, as a multiple of the characters of one call.
MAX_WITHOUT_CUT = 4
# Characters encoded on either side of a cut to check it. Tokens are shorter.
_WINDOW = 256
# Maximum number of places tried for one cut, and length of the text before ``end`` that is searched for places.
_MAX_TRIES = 32
_PLACES_LOOKED_AT = 1 << 12
# Size of a tokenizer's cache in words. By default, `tokenizers` caches the first 10,000 words for each thread that
# encodes. A word has up to 255 bytes and its tokens up to 8 KiB, so one request can fill 80 MB per thread, until the
# thread ends. This size takes 8 MiB. Encoding then runs at 92 % of the speed, and without a cache at 76 %.
_MAX_CACHED_WORDS = 1 << 10


class TextTooLongError(ValueError):
    """Raised for a text that has too many tokens, or too many characters to be encoded.

    Attributes:
        name: name of the argument with the text; None if the caller has passed only one text.
    """

    def __init__(
        self, num_characters: int | None = None, name: str | None = None, context_length: int | None = None
    ) -> None:
        self.name = name
        size = "" if num_characters is None else f" of {num_characters} characters"
        limit = "" if context_length is None else f" ({context_length} tokens)"
        super().__init__(f"a prompt{size} is longer than the maximum context length of the model{limit}")


def encode(backend: Any, text: str, *, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
    """Encode a text. The ids are the same as from a single call, wherever the text is cut.

    Args:
        backend: ``tokenizers.Tokenizer`` that neither truncates nor pads.
        add_special_tokens: True to add the ids that the tokenizer puts around a text, such as BOS.
        max_tokens: limit on the number of tokens; None: no limit. Checked only for texts that are cut.

    Raises:
        TextTooLongError: the text has more than ``max_tokens`` tokens, or it is long and has no place to cut.
        Cancelled: the request was cancelled.
        TypeError: the text is not valid Unicode.
        ValueError: the tokenizer panics at the text.
    """
    at_once = _AT_ONCE_ASCII if text.isascii() else _AT_ONCE
    if len(text) <= at_once:
        return _ids(backend, text, add_special_tokens)
    before, after = special_token_affixes(backend) if add_special_tokens else ([], [])
    ids = before
    for piece in _pieces(backend, text, at_once):
        check_cancelled()
        ids += _ids(backend, piece)
        if max_tokens is not None and len(ids) > max_tokens:
            raise TextTooLongError(len(text))
    return ids + after


def _ids(backend: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    with panics_refused():
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


@contextmanager
def panics_refused() -> Iterator[None]:
    """Convert a panic of the tokenizer to ValueError. Some texts exceed the limits of its regular expressions."""
    try:
        yield
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        raise ValueError(f"the model's tokenizer cannot tokenize this text ({one_line(error)})") from error


def special_token_affixes(backend: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that the tokenizer puts before and after a text."""
    whole, inner = _ids(backend, "a", True), _ids(backend, "a")
    start = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
    return whole[:start], whole[start + len(inner) :]


def _pieces(backend: Any, text: str, at_once: int) -> Iterator[str]:
    start = 0
    while len(text) - start > at_once:
        end = _cut(backend, text, start + at_once)
        if end is None:
            if len(text) - start > MAX_WITHOUT_CUT * at_once:
                raise TextTooLongError(len(text))
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _cut(backend: Any, text: str, end: int) -> int | None:
    """Return the position of a cut, at most ``end``, that no token crosses. Return None if no position is suitable.

    The texts on both sides of a cut must encode the same alone as together. Only boundaries between characters of
    different kinds, such as a letter and a digit, are tried. Within a run of one kind, distant characters can influence
    the tokens. Positions before white space are tried first, beginning with the last position.
    """
    places = [i for i in range(end, end - _PLACES_LOOKED_AT, -1) if _kind(text[i - 1]) != _kind(text[i])]
    places.sort(key=lambda i: not text[i].isspace())  # most tokenizers put the space at the start of a word's token
    for place in places[:_MAX_TRIES]:
        left, right = text[place - _WINDOW : place], text[place : place + _WINDOW]
        if _ids(backend, left + right) == _ids(backend, left) + _ids(backend, right):
            return place
    return None


def _kind(ch: str) -> str:
    """Return the first letter of a character's Unicode category. White space is one kind."""
    return "Z" if ch.isspace() else category(ch)[0]


def limit_word_cache(model: models.Model) -> None:
    """Limit the cache of a tokenizer's model, which maps words to tokens, to ``_MAX_CACHED_WORDS`` words.

    The limit applies to all tokenizers with this model.
    """
    if isinstance(model, models.BPE | models.Unigram):  # other models have no cache
        model._resize_cache(_MAX_CACHED_WORDS)
