"""Long texts are encoded in pieces, with the same result as if encoded whole."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.cancellation import Cancelled, caller_disconnected
from metal_engine.text import long_text
from metal_engine.text.long_text import TextTooLongError, encode
from metal_engine.text.tokenizer import Tokenizer
from tests.support.tokenizers import KINDS

WORDS = [
    "the", "quick ", "  ", "\n\n", "def f(x):\n    return x", "\u6f22\u5b57\u304b\u306a", "\U0001f600", "123456789",
    "<|im_start|>user\n", "<|im_end|>", "\t\t", "don't", "CamelCase", "\u00e9\u00e9", "\r\n", "a" * 50,
    "...", "!!!!", "a?b=c&d=e",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).flatmap(
    lambda words: st.lists(st.sampled_from([*words, " "]), min_size=200, max_size=250).map("".join)
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "_AT_ONCE_ASCII", 600)
    monkeypatch.setattr(long_text, "_AT_ONCE", 600)
    monkeypatch.setattr(long_text, "_PLACES_LOOKED_AT", 300)
    monkeypatch.setattr(long_text, "MAX_WITHOUT_CUT", 100)


class Counting:
    """Tokenizer that records the lengths of the texts that it encodes."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.lengths: list[int] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.lengths += map(len, texts)
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_make_the_whole(demo_tokenizer: Tokenizer) -> None:
    backend = demo_tokenizer.hf_tokenizer.backend_tokenizer

    @given(TEXTS)
    @settings(max_examples=20)
    def check(text: str) -> None:
        whole = backend.encode(text, add_special_tokens=True).ids
        assert encode(backend, text, add_special_tokens=True, max_tokens=None) == whole

    check()
    counting = Counting(backend)
    encode(counting, "some words " * 1_000, add_special_tokens=False, max_tokens=None)
    assert max(counting.lengths) <= 600 and len(counting.lengths) > 20


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer(kind: str) -> None:
    backend = KINDS[kind]()

    @given(TEXTS)
    @settings(max_examples=10)
    def check(text: str) -> None:
        whole = backend.encode(text).ids
        assert encode(backend, text, add_special_tokens=True, max_tokens=None) == whole

    check()


@pytest.mark.usefixtures("small_pieces")
def test_a_text_that_is_too_long_is_not_encoded_to_its_end(demo_tokenizer: Tokenizer) -> None:
    counting = Counting(demo_tokenizer.hf_tokenizer.backend_tokenizer)
    with pytest.raises(TextTooLongError):
        encode(counting, "some words " * 100_000, add_special_tokens=False, max_tokens=500)
    assert sum(counting.lengths) < 20_000
    with pytest.raises(TextTooLongError):  # the text has no place to cut
        encode(counting, "a" * 61_000, add_special_tokens=False, max_tokens=None)
    assert max(counting.lengths) <= 600


@pytest.mark.usefixtures("small_pieces")
def test_nobody_waits_for_it_any_more(demo_tokenizer: Tokenizer) -> None:
    left = threading.Event()
    left.set()
    token = caller_disconnected.set(left)
    try:
        with pytest.raises(Cancelled):
            demo_tokenizer.encode("some words " * 1_000)
    finally:
        caller_disconnected.reset(token)
