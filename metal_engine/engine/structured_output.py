"""Structured output: user's schemas, regular expressions and grammars, compiled by llguidance for one tokenizer.

Compiling runs in the thread that prepares a request, never in the engine's; its size and effort are bounded, and what
goes beyond is refused. Masks are computed by the runner, through :class:`metal_engine.sampling_params.Matcher`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llguidance
import llguidance.hf
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.errors import ParameterError
from metal_engine.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Compiled grammars kept for further requests.
_MAX_CACHED = 64
# llguidance's own units: 50,000 of the first and 14,000 of the second take about a millisecond.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=500_000,
    step_max_items=100_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Without a limit, small models write white space for ever.
_WHITESPACE = r"[ \t\r\n]{1,20}"


class CompiledGrammar:
    """A grammar, compiled. Implements :class:`metal_engine.sampling_params.Grammar`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        with self._lock:
            return GrammarMatcher(self._matcher.deep_copy())


class GrammarMatcher:
    """Implements :class:`metal_engine.sampling_params.Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def consume(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise ValueError(_first_line(self._matcher.get_error()) or f"token {token_id} does not match")

    def fill_mask(self, mask: np.ndarray) -> None:
        # At the end of the grammar, this allows the end-of-sequence tokens and nothing else.
        fill_next_token_bitmask(self._matcher, mask[None])
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each once. Thread-safe.

    Args:
        vocab_size: number of logits, which may be more than the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ll_tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(_MAX_CACHED)(self._compile_source)

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile what a request asks for, unless it has been compiled before.

        Takes milliseconds; seconds at most, for the first grammar and for what is refused as too large.

        Raises:
            ParameterError: it is no grammar, or too large, or asks for what cannot be enforced.
        """
        try:
            source = _source(params)
        except (ValueError, RecursionError) as error:
            raise ParameterError("structured_outputs", f"cannot be read: {error}") from error
        return self._compiled(source)

    def _compile_source(self, source: str) -> CompiledGrammar:
        matcher = llguidance.LLMatcher(self._tokenizer_for_masks(), source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ParameterError("structured_outputs", f"cannot be compiled: {_first_line(matcher.get_error())}")
        compiled = CompiledGrammar(matcher)
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        try:
            compiled.matcher().fill_mask(mask)
        except ValueError as error:
            raise ParameterError("structured_outputs", f"cannot be met: {error}") from error
        if not mask.any():
            raise ParameterError("structured_outputs", "cannot be met: nothing matches")
        return compiled

    def _tokenizer_for_masks(self) -> llguidance.LLTokenizer:
        with self._lock:  # made once, which takes long
            if self._ll_tokenizer is None:
                self._ll_tokenizer = llguidance.hf.from_tokenizer(
                    self._tokenizer.hf_tokenizer,
                    n_vocab=self._vocab_size,
                    eos_token=sorted(i for i in self._tokenizer.eos_token_ids if i < self._vocab_size),
                )
            return self._ll_tokenizer


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form."""
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice:
        return llguidance.LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
        )
    if params.grammar is not None:
        return llguidance.grammar_from("grammar", params.grammar)
    schema: Any = {"type": "object"}
    if params.json is not None:
        schema = json.loads(params.json) if isinstance(params.json, str) else params.json
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise ValueError("a JSON schema is an object (or true)")
    options: JsonCompileOptions = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:500]
