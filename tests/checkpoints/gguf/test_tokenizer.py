"""Tokenizers of GGUF files, compared with transformers' own classes, SentencePiece and llama.cpp."""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids, load_gguf_tokenizer
from metal_engine.errors import ModelLoadError, UnsupportedModelError
from tests.support.gguf_files import finish

FIXTURE = Path(__file__).parents[2] / "fixtures/llama_cpp_smollm2.json"
TEXTS: list[str] = [case["text"] for case in json.loads(FIXTURE.read_text())["texts"]]
# Created by tools/fixtures/gguf_tokenizer.py.
LLAMA_CPP: dict[str, Any] = json.loads((FIXTURE.parent / "llama_cpp_tokenizers.json").read_text())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


Words = tuple[dict[str, int], list[tuple[str, str]]]  # vocabulary and merges


@cache
def trained(*, use_regex: bool = True) -> Words:
    """Return a small byte-level BPE. Special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS if "<|" not in text] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(model["vocab"])
    for token in SPECIAL:
        vocab[token] = len(vocab)
    return vocab, [tuple(merge) for merge in model["merges"]]


def id_of(token: str) -> int:
    return trained()[0][token]


OF_LLAMA_CPP: Words = (
    {token: i for i, token in enumerate(LLAMA_CPP["tokens"])},
    [tuple(merge.split(" ")) for merge in LLAMA_CPP["merges"]],
)


def write_byte_level(folder: Path, pre: str | None, words: Words | None = None, **special: Any) -> Path:
    vocab, merges = words or trained()
    writer = GGUFWriter(folder / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(special.get("eos", vocab["<|im_end|>"]))
    writer.add_bos_token_id(vocab["<|im_start|>"])
    for key in ("add_bos_token", "add_eos_token"):
        if key in special:
            writer.add_bool(f"tokenizer.ggml.{key}", special[key])
    if "chat_template" in special:
        writer.add_chat_template(special["chat_template"])
    return finish(writer, folder / "t.gguf")


def gpt2_oracle(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    return GPT2Tokenizer(vocab=vocab, merges=merges, unk_token=None)


def qwen2_oracle(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    return Qwen2Tokenizer(vocab=vocab, merges=merges)


def llama3_oracle(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Return the tokenizer with the pattern that ``transformers`` uses to convert Llama 3's tiktoken files."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TikTokenConverter().pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.mark.parametrize(
    ("pre", "oracle"), [("gpt-2", gpt2_oracle), ("qwen2", qwen2_oracle), ("llama-bpe", llama3_oracle)]
)
def test_pre_tokenizers(tmp_path: Path, pre: str, oracle: Callable[..., Any]) -> None:
    # Trained with a split only between words, so that the vocabulary has merges that the rules must avoid.
    words = trained(use_regex=False)
    ours = load_gguf_tokenizer(write_byte_level(tmp_path, pre, words, add_bos_token=False))
    theirs = oracle(*words)
    theirs.add_special_tokens(SPECIAL if isinstance(theirs, Tokenizer) else {"additional_special_tokens": SPECIAL})
    for text in TEXTS:
        expected = theirs.encode(text)
        assert ours.encode(text) == (expected.ids if isinstance(theirs, Tokenizer) else expected), text
        if pre != "qwen2":  # qwen2 normalizes text
            assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "says", "added"), [("gpt-2", {}, False), ("llama-bpe", {}, True)]
    + [(pre, {"add_bos_token": value}, value) for pre in ("gpt-2", "llama-bpe") for value in (True, False)],
)  # fmt: skip
def test_bos(tmp_path: Path, pre: str, says: dict[str, bool], added: bool) -> None:
    tokenizer = load_gguf_tokenizer(write_byte_level(tmp_path, pre, **says))
    bare = tokenizer.encode("Hello world", add_special_tokens=False)
    bos = [id_of("<|im_start|>")] if added else []
    assert tokenizer.encode("Hello world") == bos + bare and tokenizer.bos_token == "<|im_start|>"


def test_eos_is_appended_when_the_file_says_so(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path, "gpt-2", add_eos_token=True)
    assert load_gguf_tokenizer(path).encode("Hi")[-1] == id_of("<|im_end|>")


def test_special_tokens_and_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = load_gguf_tokenizer(write_byte_level(tmp_path, "smollm", chat_template=template))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert ids[0] == id_of("<|im_start|>")
    assert id_of("<|im_end|>") in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi\n"
    assert len(tokenizer) == len(trained()[0])


@pytest.mark.parametrize("eos", ["<|endoftext|>", "<|im_end|>"])
def test_eos_token_ids(tmp_path: Path, eos: str) -> None:
    """Generation ends at both end-of-sequence tokens, even if the file names only one of them."""
    path = write_byte_level(tmp_path, "smollm", eos=id_of(eos))
    expected = sorted([id_of("<|endoftext|>"), id_of("<|im_end|>")])
    assert gguf_eos_token_ids(read_gguf_header(path)) == expected
    assert load_gguf_tokenizer(path).eos_token == eos


@pytest.mark.parametrize(("pre", "word"), [("some-new-bpe", "'some-new-bpe'"), (None, "no pre-tokenizer")])
def test_unknown_pre_tokenizer_is_an_error(tmp_path: Path, pre: str | None, word: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_gguf_tokenizer(write_byte_level(tmp_path, pre))
    assert word in str(caught.value)
    assert "--tokenizer" in str(caught.value)


@pytest.mark.parametrize(("model", "error"), [("bert", UnsupportedModelError), (None, ModelLoadError)])
def test_unknown_kind_is_an_error(tmp_path: Path, model: str | None, error: type[ModelLoadError]) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    if model is not None:
        writer.add_tokenizer_model(model)
    with pytest.raises(error, match=model or "tokenizer.ggml.model"):
        load_gguf_tokenizer(finish(writer, tmp_path / "t.gguf"))


@pytest.mark.parametrize("pre", LLAMA_CPP["ids"])
def test_token_ids_are_llama_cpps(tmp_path: Path, pre: str) -> None:
    """Every name of a pre-tokenizer, with tokens that span words, digits and line breaks."""
    ours = load_gguf_tokenizer(write_byte_level(tmp_path, pre, OF_LLAMA_CPP, add_bos_token=False))
    normalizes = ours.backend_tokenizer.normalizer is not None
    for text, expected in zip(LLAMA_CPP["texts"], LLAMA_CPP["ids"][pre], strict=True):
        # Qwen's own tokenizer composes characters first (NFC), and llama.cpp does not. We follow Qwen.
        if normalizes and not unicodedata.is_normalized("NFC", text):
            continue
        # GPT-4o's own tokenizer keeps combining marks with their letters, and llama.cpp does not: see below.
        if pre in PUBLISHED and any(unicodedata.category(c).startswith("M") for c in text):
            continue
        assert ours.encode(text, add_special_tokens=False) == expected, text


# Patterns in the models' own tokenizer.json.
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}{_REST}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}|\p{{N}}{_REST}",
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_pre_tokenizer_splits_words_like_the_published_pattern(tmp_path: Path, pre: str) -> None:
    """The words are those that the module ``regex`` finds, an independent implementation of regular expressions."""
    ours = load_gguf_tokenizer(write_byte_level(tmp_path, pre, OF_LLAMA_CPP, add_bos_token=False))
    split = ours.backend_tokenizer.pre_tokenizer
    for text in [*TEXTS, "// a!\n/b\n\n//c", "helloWorld HTTPServer don'T 12345"]:
        words = [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)]
        assert words == regex.findall(PUBLISHED[pre], text), text


def test_gpt_oss_ends_at_return_and_call(tmp_path: Path) -> None:
    """The token <|end|> ends one of several messages in an output here. In other models (Phi), it ends a turn."""
    for tokens, expected in (
        (["a", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], [2, 3, 4]),
        (["a", "<|end|>", "<|endoftext|>"], [1, 2]),
    ):
        writer = GGUFWriter(tmp_path / "t.gguf", "gpt-oss")
        writer.add_token_list(tokens)
        writer.add_token_types([TokenType.NORMAL] + [TokenType.CONTROL] * (len(tokens) - 1))
        writer.add_eos_token_id(2)
        assert gguf_eos_token_ids(read_gguf_header(finish(writer, tmp_path / "t.gguf"))) == expected


# Gemma's vocabulary has runs of spaces and line breaks, and tags, as tokens that are never split.
USER_DEFINED = ["▁▁", "▁▁▁", "\n\n", "<tag>"]


@pytest.mark.parametrize(("add_prefix", "user_defined"), [(True, []), (False, []), (False, USER_DEFINED)])
def test_sentencepiece(tmp_path: Path, add_prefix: bool, user_defined: list[str]) -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in TEXTS * 3 for line in text.splitlines() if line.strip()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_prefix,
        user_defined_symbols=user_defined,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(theirs.vocab_size())
    kinds = [
        TokenType.UNKNOWN
        if theirs.is_unknown(i)
        else TokenType.CONTROL
        if theirs.is_control(i)
        else TokenType.BYTE
        if theirs.is_byte(i)
        else TokenType.USER_DEFINED
        if theirs.id_to_piece(i) in user_defined
        else TokenType.NORMAL
        for i in ids
    ]
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("llama")
    # The converter writes user-defined tokens with ordinary spaces.
    pieces = [theirs.id_to_piece(i) for i in ids]
    writer.add_token_list([piece.replace("▁", " ") if piece in user_defined else piece for piece in pieces])
    writer.add_token_scores([theirs.get_score(i) for i in ids])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(theirs.bos_id())
    writer.add_eos_token_id(theirs.eos_id())
    writer.add_unk_token_id(theirs.unk_id())
    writer.add_add_space_prefix(add_prefix)
    ours = load_gguf_tokenizer(finish(writer, tmp_path / "t.gguf"))
    for text in [*TEXTS, "a   b\n\n\n<tag>  c<tag><tag>\n\n  "]:
        expected = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text) == [theirs.bos_id(), *expected] and ours.decode(expected) == text
