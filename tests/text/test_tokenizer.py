"""Limits of the tokenizer, and long texts, which are encoded in pieces. Token ids are tested with loading."""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from metal_engine.cancellation import Cancelled, caller_disconnected
from metal_engine.text import long_text
from metal_engine.text.long_text import TextTooLongError, encode
from metal_engine.text.tokenizer import Tokenizer
from tests.support.tokenizers import KINDS
from tools.fixtures.fake_engine import tiny_tokenizer


def test_a_text_that_cannot_fit_is_refused_before_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    limited = tokenizer.limited(100)
    longest = max(tokenizer.hf_tokenizer.get_vocab(), key=len)
    assert len(limited.encode(longest * 101)) >= 100  # the text may just fit, so the engine counts its tokens
    monkeypatch.setattr("metal_engine.text.tokenizer.encode", None)  # must not be called
    size = len(longest * 401)
    message = f"a prompt of {size} characters is longer than the maximum context length of the model ({{}} tokens)"
    for refusing, context_length in ((limited, 100), (tokenizer.limited(100, 25), 25)):
        with pytest.raises(TextTooLongError) as caught:
            refusing.encode(longest * 401)
        assert str(caught.value) == message.format(context_length)


@pytest.mark.parametrize(("name", "given"), [
    ("messages", {"messages": [{"role": "user", "content": "x", "name": "TEXT"}]}),
    ("messages", {"messages": [{"role": "user", "content": "x", "TEXT": 1}]}),
    ("messages", {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": ["TEXT"]}]}]}),
    ("tools", {"tools": [{"function": {"description": "TEXT"}}]}),
    ("a", {"a": {"TEXT": 1}}),
])  # fmt: skip
def test_template_arguments_too_long_for_a_prompt_are_refused(name: str, given: dict[str, Any]) -> None:
    """Long texts are refused at any place in the arguments, before they are processed."""
    tokenizer = tiny_tokenizer()
    tokenizer.hf_tokenizer.chat_template = "{{ messages[0].content }}"
    longest = 4 * max(map(len, tokenizer.hf_tokenizer.get_vocab())) * 100

    def ids(length: int) -> list[int]:
        arguments = json.loads(json.dumps(given).replace("TEXT", "a" * length))
        messages = arguments.pop("messages", [{"role": "user", "content": "x"}])
        return tokenizer.limited(100).apply_chat_template(messages, **arguments)

    assert ids(longest - 200) == tokenizer.encode("x")
    with pytest.raises(TextTooLongError) as caught:
        ids(longest + 1)
    assert caught.value.name == name


def test_reasoning_under_several_field_names_counts_once_for_the_limit() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.hf_tokenizer.chat_template = "{{ messages[0].content }}"
    text = "a" * (4 * max(map(len, tokenizer.hf_tokenizer.get_vocab())) * 100 - 200)
    message = {"role": "assistant", "content": "x", "reasoning": text, "reasoning_content": text, "thinking": text}
    assert tokenizer.limited(100).apply_chat_template([message]) == tokenizer.encode("x")


def test_a_limited_copy_does_not_limit_the_original_tokenizer() -> None:
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_few_words_are_remembered() -> None:
    """The word cache is limited. All words of this test would take 32 MiB in each thread."""
    tokenizer = tiny_tokenizer()
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=250)) for _ in range(4_000)]
    grown: list[int] = []

    def encode() -> None:
        before = resident()
        for word in words:
            tokenizer.encode(word)
        grown.append(resident() - before)

    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join()
    assert grown[0] < 16 << 20


def test_special_tokens_of_grammars() -> None:
    """``special_token_texts`` has the tokens that llguidance treats as special, except the byte of its own mark."""
    hf: Any = tiny_tokenizer().hf_tokenizer
    plain = ["<think>", "</think>", "<|tool_call>", "[THINK]", "<a", "b>", "<>", "->"]
    hf.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    reference = llguidance.LLTokenizer(hf.backend_tokenizer.to_str(), n_vocab=len(hf))
    expected = {hf.convert_ids_to_tokens(i): i for i in range(256, len(hf)) if reference.is_special_token(i)}
    assert Tokenizer(hf).special_token_texts == expected


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
        assert encode(backend, text, add_special_tokens=True, max_tokens=None) == backend.encode(text).ids

    check()


@pytest.mark.usefixtures("small_pieces")
def test_encoding_stops_once_the_text_exceeds_the_token_limit(demo_tokenizer: Tokenizer) -> None:
    counting = Counting(demo_tokenizer.hf_tokenizer.backend_tokenizer)
    with pytest.raises(TextTooLongError):
        encode(counting, "some words " * 100_000, add_special_tokens=False, max_tokens=500)
    assert sum(counting.lengths) < 20_000
    with pytest.raises(TextTooLongError):  # the text has no place to cut
        encode(counting, "a" * 61_000, add_special_tokens=False, max_tokens=None)
    assert max(counting.lengths) <= 600


@pytest.mark.usefixtures("small_pieces")
def test_encoding_is_cancelled_after_the_client_disconnects(demo_tokenizer: Tokenizer) -> None:
    left = threading.Event()
    left.set()
    token = caller_disconnected.set(left)
    try:
        with pytest.raises(Cancelled):
            demo_tokenizer.encode("some words " * 1_000)
    finally:
        caller_disconnected.reset(token)
