"""The tokenizer's own limits; its ids are checked where tokenizers are loaded."""

from __future__ import annotations

import pytest

from metal_engine.engine.long_text import TextTooLongError
from tools.fixtures.fake_engine import tiny_tokenizer


def test_what_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    limited = tokenizer.limited(100)
    longest = max(tokenizer.hf_tokenizer.get_vocab(), key=len)
    assert len(limited.encode(longest * 101)) >= 100  # it may just fit: the engine counts its tokens
    monkeypatch.setattr("metal_engine.engine.tokenizer.encode", None)  # must not be called
    with pytest.raises(TextTooLongError, match="maximum context length"):
        limited.encode(longest * 401)


def test_the_tokenizer_itself_takes_anything() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.limited(1)
    assert len(tokenizer.encode("a" * 10_000)) > 1000


def test_the_vocabulary_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    kind, looked = type(tokenizer.hf_tokenizer), []
    get_vocab = kind.get_vocab
    monkeypatch.setattr(kind, "get_vocab", lambda self: (looked.append(1), get_vocab(self))[1])
    for _ in range(3):
        tokenizer.limited(100).encode("a")
    assert len(looked) == 1
