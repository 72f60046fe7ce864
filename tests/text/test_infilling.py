"""Infilling prompts in the forms that the models' authors published."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from metal_engine.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level, metaspace_always, metaspace_first, prepending


def tokenizer_with(backend: BackendTokenizer, *marks: str, bos: bool = False) -> Tokenizer:
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    if bos:
        backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def spelled(tokenizer: Tokenizer, prefix: str | list[int], suffix: str) -> tuple[list[str], list[str]]:
    """Return the prompt's tokens, and the tokens of the prefix in it."""
    ids, place = tokenizer.encode_infilling(prefix, tokenizer.encode_within(suffix))
    return tokenizer.tokens(ids), tokenizer.tokens(ids[place])


FORMS = [
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>ab<|fim_suffix|>the<|fim_middle|>"),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>ab<fim_suffix>the<fim_middle>"),
    (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), "<fim-prefix>ab<fim-suffix>the<fim-middle>"),
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>ab<｜fim▁hole｜>the<｜fim▁end｜>"),
    (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), "<|code_prefix|>ab<|code_suffix|>the<|code_middle|>"),
    (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]the[PREFIX]ab"),
    (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]the[PREFIX]ab"),
]


@pytest.mark.parametrize(("marks", "text"), FORMS)
@pytest.mark.parametrize("bos", [False, True])
def test_the_forms_of_byte_level_tokenizers(marks: tuple[str, ...], text: str, bos: bool) -> None:
    """The ids equal those of the whole prompt text that the model's authors show."""
    tokenizer = tokenizer_with(byte_level(), *marks, bos=bos)
    ids, place = tokenizer.encode_infilling("ab", tokenizer.encode_within("the"))
    assert ids == tokenizer.encode(text)
    assert (ids[0] == tokenizer.hf_tokenizer.convert_tokens_to_ids("<s>")) == bos
    assert tokenizer.tokens(ids[place]) == ["a", "b"]


@pytest.mark.parametrize("make", [prepending, metaspace_first, metaspace_always])
def test_code_llama(make: object) -> None:
    """``<PRE> {prefix} <SUF>{suffix} <MID>``: the prefix begins with a space, the suffix without a space."""
    tokenizer = tokenizer_with(make(), "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", bos=True)  # type: ignore[operator]
    tokens, of_prefix = spelled(tokenizer, "the a", "the b")
    assert of_prefix == ["▁the", "▁", "a"]
    assert tokens == ["<s>", "▁<PRE>", *of_prefix, "▁<SUF>", "the", "▁", "b", "▁<MID>"]
    assert tokenizer.infilling is not None
    assert tokenizer.tokens(tokenizer.infilling.ends) == ["▁<EOT>"]


def test_codestral() -> None:
    """Same ids as mistral-common: ``[SUFFIX]``, the suffix without a space before it, ``[PREFIX]``, the prefix."""
    tokenizer = tokenizer_with(prepending(), "[PREFIX]", "[MIDDLE]", "[SUFFIX]", bos=True)
    tokens, of_prefix = spelled(tokenizer, "the", "the")
    assert tokens == ["<s>", "[SUFFIX]", "the", "[PREFIX]", "▁the"] and of_prefix == ["▁the"]


def test_token_ids_given_as_prefix_are_used_unchanged() -> None:
    tokens, of_prefix = spelled(tokenizer_with(byte_level(), *FORMS[0][0], bos=True), [97, 98], "c")
    assert tokens == ["<|fim_prefix|>", "a", "b", "<|fim_suffix|>", "c", "<|fim_middle|>"] and of_prefix == ["a", "b"]


def test_tokenizers_without_all_the_tokens_have_none() -> None:
    assert tokenizer_with(byte_level()).infilling is None
    assert tokenizer_with(byte_level(), "<|fim_prefix|>", "<|fim_suffix|>").infilling is None
