"""Builds infilling (fill in the middle) prompts from a prefix and a suffix, in the models' training format."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer as BackendTokenizer

# Tokens before the prefix, the suffix and the middle. Without a token for the middle, the suffix comes first.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
# Tokens that end an infilling, in addition to the end of sequence: end of the infilling, or the next file.
_ENDS = (
    *("▁<EOT>", "<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>"),
    *("<|file_sep|>", "<file_sep>", "<|file_separator|>"),
)


@dataclass(frozen=True)
class Infilling:
    """Ids of the control tokens with which a tokenizer writes infilling prompts.

    Attributes:
        prefix: id of the token before the prefix.
        suffix: id of the token before the suffix.
        middle: id of the token at the end of the prompt. None if the prompt is the suffix and then the prefix, without
            this token.
        ends: ids of the tokens that end the generated text, in addition to the end of sequence.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, backend: BackendTokenizer) -> Infilling | None:
        """Return the infilling tokens of a tokenizer; None if infilling is not supported."""
        ends = [backend.token_to_id(end) for end in _ENDS]
        for marks in _MARKS:
            prefix, suffix, middle = map(backend.token_to_id, marks)
            if prefix is not None and suffix is not None and (middle is not None or not marks[2]):
                return cls(prefix, suffix, middle, tuple(end for end in ends if end is not None))
        return None

    def join(self, prefix: list[int], suffix: list[int]) -> tuple[list[int], slice]:
        """Return the prompt and the positions of the prefix in it."""
        if self.middle is None:
            before = [self.suffix, *suffix, self.prefix]
            return before + prefix, slice(len(before), len(before) + len(prefix))
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle], slice(1, 1 + len(prefix))
