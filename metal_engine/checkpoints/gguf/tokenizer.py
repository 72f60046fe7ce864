"""Creates a fast ``transformers`` tokenizer from a GGUF file.

``transformers`` reads GGUF only if torch is installed. Therefore the tokenizer is created here from
``tokenizer.ggml.*`` with the ``tokenizers`` library. Two kinds are supported: byte-level BPE ("gpt2"), whose
pre-tokenizer is only named in the file, and SentencePiece BPE with byte fallback ("llama"). Does not import MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from metal_engine.checkpoints.gguf.header import GgufHeader, header_of
from metal_engine.errors import ModelLoadError, UnsupportedModelError, short

# End-of-turn tokens. Checkpoints have them as control tokens, but do not always name them in the metadata.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|return|>", "<|call|>")
# If a vocabulary has both of these (gpt-oss), "<|end|>" ends one of several messages in a turn.
_HARMONY_ENDS = ("<|return|>", "<|call|>")
_END_OF_MESSAGE = "<|end|>"
_SPACE = "▁"
# Limit of tokens that are never split. All text is searched for each of them; models have up to 7,000.
_MAX_UNSPLIT = 1 << 16
# Limit of characters examined while each token is split at each position. A vocabulary of 262k tokens needs 20 million.
_MAX_CUTS = 1 << 30


@dataclass(frozen=True)
class _Bpe:
    """Rules of a pre-tokenizer, selected by its name in ``tokenizer.ggml.pre``.

    Attributes:
        split: creates the pre-tokenizers, which end with the mapping of bytes to characters.
        nfc: True if text is normalized to NFC, as in the original tokenizer.
        ignore_merges: True if a word that is a token is used directly, without merging from bytes.
        add_bos: True to add a beginning-of-sequence token if the file has no setting for it.
    """

    split: Callable[[], list[Any]]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _pattern(digits: str) -> Callable[[], list[Any]]:
    """Return a function that creates the pre-tokenizers of GPT-4 and its descendants.

    The descendants differ in ``digits``, the regular expression for a piece of digits.
    """
    words = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
    return _split(rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def _cased_pattern(digits: str, endings: str) -> Callable[[], list[Any]]:
    """Return a function that creates GPT-4o's pre-tokenizers.

    A capital inside a word starts a new piece. Combining marks stay with their letters. ``digits`` and ``endings`` are
    regular expressions for a piece of digits and for the end of a word, such as "'s".
    """
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{endings}|{start}{upper}+{lower}*{endings}"
    return _split(rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def _split(regex: str) -> Callable[[], list[Any]]:
    return lambda: [
        pre_tokenizers.Split(Regex(regex), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _gpt2_single_digits() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


_LLAMA3 = _Bpe(_pattern(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_GPT4 = _Bpe(_pattern(r"\p{N}{1,3}"))
# llama.cpp's name of a pre-tokenizer -> pre-tokenizer of the original tokenizer.json files.
PRE_TOKENIZERS = {
    "gpt-2": _Bpe(_gpt2),
    "smollm": _Bpe(_gpt2_single_digits),
    "starcoder": _Bpe(_gpt2_single_digits),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Bpe(_pattern(r"\p{N}"), nfc=True),
    "deepseek-r1-qwen": _Bpe(_pattern(r"\p{N}"), add_bos=True),
    "dbrx": _GPT4,  # Phi-4, OLMo 2
    "smaug-bpe": _GPT4,  # SmolLM3
    "refact": _Bpe(_gpt2_single_digits),  # Granite 3
    "gpt-4o": _Bpe(_cased_pattern(r"\p{N}{1,3}", f"{_ENDINGS}?")),  # gpt-oss, Phi-4 mini
    "tekken": _Bpe(_cased_pattern(r"\p{N}", ""), ignore_merges=True, add_bos=True),  # Mistral Nemo
}


def load_gguf_tokenizer(file: str | Path | GgufHeader) -> PreTrainedTokenizerFast:
    """Create the tokenizer of a GGUF file, given by its path or its header, with its chat template.

    Raises:
        UnsupportedModelError: the kind of tokenizer is not supported. A guess would give wrong tokens.
        ModelLoadError: the file cannot be read or a part is missing.
    """
    header = header_of(file)
    kind = header.require("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(header)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(header), True
    else:
        raise UnsupportedModelError(f"{header.path.name}: tokenizer {short(kind)} is not supported; use --tokenizer")
    _add_special_tokens(header, tokenizer)
    special = _special_tokens(header)
    bos, eos = (
        special.get(name) if header.metadata.get(f"tokenizer.ggml.add_{name}_token", default) else None
        for name, default in (("bos", add_bos), ("eos", False))
    )
    around = [token for token in (bos, eos) if token is not None]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token for token in (bos, "$A", eos) if token is not None],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        model_max_length=header.metadata.get(f"{header.architecture}.context_length"),
        clean_up_tokenization_spaces=False,
        bos_token=special.get("bos"),
        eos_token=special.get("eos"),
        unk_token=special.get("unknown"),
        pad_token=special.get("padding"),
    )


def gguf_eos_token_ids(header: GgufHeader) -> list[int]:
    """Return every token id that ends generation, in ascending order.

    The result has the ids in the file's settings, and the control tokens in ``_END_OF_TURN``. In gpt-oss's vocabulary,
    ``<|end|>`` ends only a message and is left out.
    """
    metadata = header.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = {token_id for token_id in named if token_id is not None}
    types = metadata.get("tokenizer.ggml.token_type", [])
    ends = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(metadata.get("tokenizer.ggml.tokens", []), types, strict=False))
        if kind == TokenType.CONTROL and token in _END_OF_TURN
    }
    ids.update(ends.values())
    if all(token in ends for token in _HARMONY_ENDS):
        ids.discard(ends.get(_END_OF_MESSAGE))
    return sorted(ids)


def _byte_level_bpe(header: GgufHeader) -> tuple[Tokenizer, bool]:
    pre = header.metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        problem = f"pre-tokenizer {short(pre)} is not supported" if pre else "the file names no pre-tokenizer"
        raise UnsupportedModelError(f"{header.path.name}: {problem}; name another tokenizer with --tokenizer")
    rules = PRE_TOKENIZERS[pre]
    tokens = header.require("tokenizer.ggml.tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # Spaces inside the two parts are written as "Ġ", so the only space separates the parts.
    merges = [tuple(merge.split(" ", 1)) for merge in header.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = rules.split()
    if header.metadata.get("tokenizer.ggml.add_space_prefix", False):
        split[-1].add_prefix_space = True
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _sentencepiece_bpe(header: GgufHeader) -> Tokenizer:
    tokens = header.require("tokenizer.ggml.tokens")
    scores = header.require("tokenizer.ggml.scores")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(header, vocab, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if prefix else []),
        ]
    )
    return tokenizer


def _merges_from_scores(header: GgufHeader, vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return BPE merges, in the order in which SentencePiece merges: the pair whose union has the best score is first.

    Raises:
        ModelLoadError: the tokens have too many characters, or the file has no types of tokens.
    """
    types = header.require("tokenizer.ggml.token_type")
    if sum(len(token) ** 2 for token in vocab) > _MAX_CUTS:
        raise ModelLoadError(f"{header.path.name} has tokens with too many characters")
    merges = []
    for token, token_id in vocab.items():
        if types[token_id] not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[token_id], vocab[left], vocab[right], (left, right)))
    return [pair for *_, pair in sorted(merges)]


def _special_tokens(header: GgufHeader) -> dict[str, str]:
    """Return the tokens for the roles ``bos``, ``eos``, ``unknown`` and ``padding``, by role.

    Leaves out the roles that have no token in the metadata.
    """
    tokens = header.require("tokenizer.ggml.tokens")
    special = {}
    for role in ("bos", "eos", "unknown", "padding"):
        token_id = header.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None and token_id < len(tokens):  # some files contain -1, as unsigned, for "none"
            special[role] = tokens[token_id]
    return special


def _add_special_tokens(header: GgufHeader, tokenizer: Tokenizer) -> None:
    """Add control tokens as special tokens, and user-defined tokens as ordinary text that is never split.

    Raises:
        ModelLoadError: there are more such tokens than ``_MAX_UNSPLIT``.
    """
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    unsplit = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    if sum(kind in unsplit for kind in kinds) > _MAX_UNSPLIT:
        raise ModelLoadError(f"{header.path.name} has more control and user-defined tokens than {_MAX_UNSPLIT}")
    added = [
        AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
        for token, kind in zip(header.require("tokenizer.ggml.tokens"), kinds, strict=False)
        if kind in unsplit
    ]
    tokenizer.add_tokens(added)
