"""Resolves sampling parameters to rules about a model's token ids, such as stop tokens, bad words and grammars."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from metal_engine.engine.phase_rules_maker import PhaseRulesMaker
from metal_engine.errors import ParameterError, short
from metal_engine.grammars.compiler import GrammarCompiler
from metal_engine.output_phases import OutputPhases
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.text.tokenizer import Tokenizer
from metal_engine.token_rules import Grammar, TokenRules


class GrammarMaker(Protocol):
    """Factory of the grammars of outputs. Thread-safe."""

    def grammar_for(
        self, structured: StructuredOutputsParams | None, phases: OutputPhases | None, stop_token_ids: np.ndarray
    ) -> Grammar:
        """Return the grammar of an output that has a structured output, rules for its phases, or both.

        Waits for the compilation of a structured output, but not for the grammars of tool calls.

        Args:
            structured: structured output; None for free content. ``phases`` must then be given.
            phases: phases of the output; None for an output that consists of content only.
            stop_token_ids: tokens that end generation, [S] int32.

        Raises:
            ParameterError: the structured output is invalid.
            OverloadedError: too many grammars are waiting to be compiled.
            Cancelled: the request was cancelled.
        """

    def close(self) -> None:
        """End the processes that compile grammars."""


class LocalGrammars:
    """Factory of grammars for an engine in this process. Implements :class:`GrammarMaker`.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of logits, which may exceed the number of the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._phases = PhaseRulesMaker(tokenizer, self._compiler)

    def grammar_for(
        self, structured: StructuredOutputsParams | None, phases: OutputPhases | None, stop_token_ids: np.ndarray
    ) -> Grammar:
        """See :meth:`GrammarMaker.grammar_for`."""
        if phases is not None:
            return self._phases.rules_for(phases, structured, stop_token_ids)
        assert structured is not None
        return self._compiler.compile(structured)

    def close(self) -> None:
        """End the processes that compile grammars."""
        self._compiler.close()


class TokenRulesMaker:
    """Factory of :class:`TokenRules`. Thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of logits, which may exceed the number of the tokenizer's tokens.
        grammars: factory of grammars; None for :class:`LocalGrammars`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, grammars: GrammarMaker | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.grammars = grammars or LocalGrammars(tokenizer, vocab_size)

    def rules_for(self, params: SamplingParams) -> TokenRules:
        """Resolve sampling parameters. Compiles the grammar if there is one, which takes time.

        Raises:
            ParameterError: the model does not support the parameters.
            OverloadedError: too many grammars are waiting to be compiled.
            Cancelled: the request was cancelled while its grammar was compiled.
        """
        self._check_sizes(params)
        eos = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
        stop = eos | frozenset(params.stop_token_ids)
        stop_token_ids = np.array(sorted(i for i in stop if i < self._vocab_size), np.int32)
        grammar: Grammar | None = None
        phases, structured = params.phases, params.structured_outputs
        if phases is not None and not params.has_phase_rules and structured is None:
            phases = None
        if phases is not None or structured is not None:
            grammar = self.grammars.grammar_for(structured, phases, stop_token_ids)
        biases = params.logit_bias or {}
        bad_words = self._bad_words(params)
        self._check_choice(params, stop, bad_words.get((), []))
        return TokenRules(
            stop_token_ids=stop_token_ids,
            bad_words=bad_words,
            allowed=self._allowed(params),
            bias_ids=np.fromiter(biases, np.int32),
            biases=np.fromiter(biases.values(), np.float32),
            grammar=grammar,
        )

    def close(self) -> None:
        """End the processes that compile grammars."""
        self.grammars.close()

    def _check_sizes(self, params: SamplingParams) -> None:
        """Raise ParameterError if a biased token is not in the vocabulary, or if a list has more ids than it."""
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            if len(getattr(params, name) or ()) > self._vocab_size:
                raise ParameterError(name, f"may have {self._vocab_size} entries, as many as the vocabulary")
        for token_id in params.logit_bias or ():
            self._check_token_id("logit_bias", token_id)

    def _check_token_id(self, name: str, token_id: int) -> None:
        if token_id >= self._vocab_size:
            message = f"has token id {short(token_id)}, outside the vocabulary of {self._vocab_size}"
            raise ParameterError(name, message)

    def _check_choice(self, params: SamplingParams, stop: frozenset[int], bad_words: list[int]) -> None:
        """Raise ParameterError if no token is allowed at the start of the output."""
        excluded = {*bad_words, *stop} if params.min_tokens > 0 and params.structured_outputs is None else {*bad_words}
        allowed = range(self._vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        if len(excluded) and all(token_id in excluded for token_id in allowed):
            name = "bad_words" if len({*bad_words}) == self._vocab_size else "min_tokens"
            name = name if params.allowed_token_ids is None else "allowed_token_ids"
            raise ParameterError(name, "leaves no token beside bad_words, stop tokens and min_tokens")

    def _allowed(self, params: SamplingParams) -> np.ndarray | None:
        """Return the bit mask of ``allowed_token_ids``; None if the parameter is not set.

        The mask is [W] int32 with 32 tokens in each word, the lowest bit first.
        """
        if params.allowed_token_ids is None:
            return None
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, bool)
        # Before the conversion, which could overflow int32.
        self._check_token_id("allowed_token_ids", max(params.allowed_token_ids, default=0))
        allowed[np.array(params.allowed_token_ids, np.int32)] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _bad_words(self, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
        """Return a map from the leading tokens of the bad words to the last tokens that complete a bad word.

        E.g. ``{(): [9], (5, 6): [7, 8]}`` for the words [9], [5, 6, 7] and [5, 6, 8]. Raises ParameterError if a word
        cannot be tokenized or has no tokens.
        """
        ends: dict[tuple[int, ...], list[int]] = {}
        for word in params.bad_words:
            for *before, last in self._spellings(word):
                if last < self._vocab_size:  # tokenizers may have more tokens than the model
                    ends.setdefault(tuple(before), []).append(last)
        return ends

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the token ids of a word, and the token ids of a space and the word. Ignores spaces before the word.

        The second list is omitted if it begins with the same token as the first list, or differs in length.
        Raises ParameterError if the word cannot be tokenized or has no tokens.
        """
        word = word.lstrip()
        try:
            plain = tuple(self._tokenizer.encode(word, add_special_tokens=False))
            spaced = tuple(self._tokenizer.encode(" " + word, add_special_tokens=False))
        except ValueError as error:
            raise ParameterError("bad_words", f"has a word that cannot be tokenized: {error}") from error
        if not plain:
            raise ParameterError("bad_words", "has a word without any token")
        spellings = [plain]
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spellings.append(spaced)
        return spellings
