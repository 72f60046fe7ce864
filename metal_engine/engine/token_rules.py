"""What sampling parameters mean in a model's tokens."""

from __future__ import annotations

from metal_engine.engine.structured_output import GrammarCompiler
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.sampling_params import SamplingParams, TokenRules


class TokenRulesMaker:
    """Makes :class:`TokenRules`. Thread-safe.

    Args:
        vocab_size: number of logits, which may be more than the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler = GrammarCompiler(tokenizer, vocab_size)

    def rules_for(self, params: SamplingParams) -> TokenRules:
        """Raises ValueError if the model cannot follow them; the message begins with the parameter's name."""
        eos = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
        stop = eos | frozenset(params.stop_token_ids)
        grammar = None
        if params.structured_outputs is not None:
            grammar = self._compiler.compile(params.structured_outputs)
        return TokenRules(
            stop_token_ids=tuple(sorted(i for i in stop if i < self._vocab_size)),
            bad_words=tuple(dict.fromkeys(ids for word in params.bad_words for ids in self._spellings(word))),
            grammar=grammar,
        )

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word's tokens, at the beginning of a text and, if that is another first token, after a space."""
        word = word.lstrip()
        plain = tuple(self._tokenizer.encode(word, add_special_tokens=False))
        spaced = tuple(self._tokenizer.encode(" " + word, add_special_tokens=False))
        spellings = [plain]
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spellings.append(spaced)
        return spellings
