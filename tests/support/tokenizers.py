"""Small tokenizers of several kinds, with the control tokens of a chat."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tools.fixtures.fake_engine import byte_tokens

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
# Added, but not special.
OTHERS = ("<think>", "</think>", "<tool_call>", "<|fim|>", "<b>", "  ")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [chr(c) for c in range(33, 127)]


def byte_level() -> Tokenizer:
    tokens = [*byte_tokens(), "th", "the", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_with_prefix() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _bpe_of_sentencepiece() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", *LETTERS, "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace_first() -> Tokenizer:
    tokenizer = _bpe_of_sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def metaspace_always() -> Tokenizer:
    tokenizer = _bpe_of_sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    return tokenizer


def prepending() -> Tokenizer:
    tokenizer = _bpe_of_sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer whose model contains control tokens as pieces and prefers them to all others."""
    pieces: list[tuple[str, float]] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(byte, -20.0) for byte in BYTES] + [("▁", -5.0), *((c, -8.0) for c in LETTERS), ("▁the", -6.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "</s>", *LETTERS, *(f"##{c}" for c in LETTERS), "the"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS = {
    one.__name__: one
    for one in (byte_level, byte_level_with_prefix, metaspace_first, metaspace_always, prepending, unigram, word_piece)
}


def chat_tokenizer(kind: str, template: str, *, normalized: bool = False) -> Any:
    """Return a tokenizer of a kind in the form of ``transformers``.

    Args:
        normalized: match the added tokens that are not special in normalized text.
    """
    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=normalized) for token in OTHERS])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    hf.chat_template = template
    return hf
