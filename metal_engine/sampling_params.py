"""Sampling parameters, validated on construction: :class:`SamplingParams`. Names and meanings are vLLM's."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from metal_engine.errors import ParameterError, short
from metal_engine.json_values import num_characters
from metal_engine.output_phases import OutputPhases

# Limits on a request's memory besides its tokens. Practical requests stay far below them.
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARACTERS = 16_384
MAX_LOGIT_BIASES = 16_384
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_GRAMMAR_CHARACTERS = 131_072
MAX_CHOICES = 1_024
# The maximum numbers of alternatives and of choices are OpenAI's.
MAX_LOGPROBS = 20
MAX_N = 128


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Format of the whole output: exactly one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar``.

    Attributes:
        json: JSON schema, as an object, a boolean or text.
        json_object: True for any JSON object.
        regex: regular expression in the syntax of Rust's ``regex``.
        choice: list of texts. The output must be one of these texts.
        grammar: context-free grammar in Lark's or GBNF's syntax.
        disable_any_whitespace: True for JSON without white space between its tokens.
        whitespace_pattern: regular expression for the white space between JSON tokens.
        strict: True to allow only the named properties in the objects of a JSON schema, even if an object names no
            properties. If False, this applies only to objects with ``properties``. In both cases,
            ``additionalProperties`` takes precedence.

    Raises:
        ParameterError: no field or several fields are given, or a field has the wrong type or size.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) not in (None, ())]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            message = f"must have exactly one of {', '.join(kinds)}; got {' and '.join(given) or 'none'}"
            raise ParameterError("structured_outputs", message)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_type(f"structured_outputs.{name}", getattr(self, name), str | None, "a string")
        for name in ("json_object", "disable_any_whitespace", "strict"):
            _check_type(f"structured_outputs.{name}", getattr(self, name), bool | None, "true or false")
        schema_types = str | Mapping | bool | None
        _check_type("structured_outputs.json", self.json, schema_types, "a JSON schema (an object)")
        _check_size("structured_outputs.choice", len(self.choice or ()), MAX_CHOICES, "entries")
        size = sum(len(text) for text in (self.regex, self.grammar, self.whitespace_pattern) if text)
        size += len(self.schema_text or "") + sum(map(len, self.choice or ()))
        _check_size("structured_outputs", size, MAX_GRAMMAR_CHARACTERS, "characters")

    @property
    def schema_text(self) -> str | None:
        """JSON schema as JSON text; None without a schema.

        Raises ParameterError if a schema that is not text has too many characters or is not JSON.
        """
        if self.json is None or isinstance(self.json, str):
            return self.json
        if num_characters(self.json, per_value=1, limit=MAX_GRAMMAR_CHARACTERS) > MAX_GRAMMAR_CHARACTERS:
            raise ParameterError("structured_outputs", f"may have at most {MAX_GRAMMAR_CHARACTERS} characters")
        try:
            return json.dumps(self.json)
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError("structured_outputs.json", f"is not JSON: {error}") from error


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Names and meanings are vLLM's.

    Logits are edited in this order: structured output and ``allowed_token_ids``, ``bad_words``, ``min_tokens``,
    ``logit_bias``, penalties. They are then divided by the temperature, and cut by ``min_p``, ``top_k`` and ``top_p``.

    Raises:
        ParameterError: a value has the wrong type or is out of range.
    """

    n: int = 1
    """Number of outputs to generate for each prompt. With a seed, output ``i`` uses ``seed + i``."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate; ``None`` means until ``max_model_len``."""
    min_tokens: int = 0
    """Minimum number of tokens before an end-of-sequence token, a stop token or a stop string ends generation."""
    temperature: float = 1.0
    """Divisor of the logits, applied after penalties and biases and before cuts; 0 means greedy sampling."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose total probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the highest probability; 0 keeps all."""
    repetition_penalty: float = 1.0
    """For tokens in the prompt or the output: divides positive logits, and multiplies negative ones; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once for each occurrence; -2 to 2."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Token id -> number added to its logit; -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that may be generated."""
    bad_words: tuple[str, ...] = ()
    """Words that may not be generated: the last token of a word is excluded after the other tokens of the word."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same random draws in any batch; -1 means no seed."""
    stop: tuple[str, ...] = ()
    """Strings that end generation. The text is cut before the first match."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, besides the model's own end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string, or after the stop token's text, instead of before it."""
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence ids."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    logprobs: int | None = None
    """Number of most likely tokens (0 to 20) whose log probabilities are returned, besides each output token's own.

    Log probabilities refer to the model's own distribution, before penalties, biases, masks and temperature.
    """
    prompt_logprobs: int | None = None
    """``logprobs`` for the prompt's tokens. The whole prompt is then computed, without cached prefixes."""
    truncate_prompt_tokens: int | None = None
    """Number of last prompt tokens to keep; -1 keeps as many as fit together with ``max_tokens``."""
    structured_outputs: StructuredOutputsParams | None = None
    """Format that the output must match; with ``phases.reasoning``, the output after its reasoning."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens in a chat. Ignored if the model does not reason. ``None`` means no limit."""
    phases: OutputPhases | None = None
    """Rules of single parts of a chat's answer: the budget of the reasoning, and grammars of tool calls."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop_token_ids, allowed_token_ids = self.stop_token_ids, self.allowed_token_ids
        self._set(
            stop=_strings("stop", stop),
            stop_token_ids=_token_ids("stop_token_ids", () if stop_token_ids is None else stop_token_ids),
            bad_words=_strings("bad_words", self.bad_words),
            allowed_token_ids=None if allowed_token_ids is None else _token_ids("allowed_token_ids", allowed_token_ids),
            logit_bias=_biases(self.logit_bias),
        )
        self._check_sizes()
        for name, (convert, is_allowed, allowed) in _NUMBERS.items():
            value = convert(name, getattr(self, name))
            if value is not None and not is_allowed(value):
                raise ParameterError(name, f"must {allowed}, got {short(value)}")
            self._set(**{name: value})
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _check_type(name, getattr(self, name), bool, "true or false")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ParameterError("structured_outputs", "must be StructuredOutputsParams")
        self._check_structured_outputs()

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_structured_outputs(self) -> None:
        for name in _WITHOUT_GRAMMARS:
            if self.structured_outputs is not None and getattr(self, name):
                message = "and structured_outputs exclude each other: together they may allow no token"
                raise ParameterError(name, message)

    def _check_sizes(self) -> None:
        if not all(self.stop):
            raise ParameterError("stop", "cannot contain an empty string")
        if not all(map(str.strip, self.bad_words)):
            raise ParameterError("bad_words", "cannot contain an empty string")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise ParameterError("stop", f"strings may have at most {MAX_STOP_CHARACTERS} characters together")
        _check_size("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "entries")
        _check_size("bad_words", len(self.bad_words), MAX_BAD_WORDS, "entries")
        _check_size("bad_words", sum(map(len, self.bad_words)), MAX_BAD_WORD_CHARACTERS, "characters together")
        ids = self.allowed_token_ids
        if ids is not None and not 1 <= len(ids) <= MAX_ALLOWED_TOKEN_IDS:
            raise ParameterError("allowed_token_ids", f"must have 1 to {MAX_ALLOWED_TOKEN_IDS} entries")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def excludes_grammars(self) -> bool:
        """True if a parameter excludes grammars, because together they may allow no token."""
        return any(getattr(self, name) for name in _WITHOUT_GRAMMARS)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """True if masks, biases, penalties or a minimum length change the logits before the temperature is applied."""
        if self.allowed_token_ids is not None or self.min_tokens > 0:
            return True
        return bool(self.logit_bias) or self.needs_token_on_host or self.has_phase_rules

    @property
    def has_phase_rules(self) -> bool:
        """True if a phase of the output restricts the next token: a budget, a structured output or a call's grammar.

        False if :attr:`phases` only says where the phases begin and end.
        """
        phases = self.phases
        if phases is None or (self.structured_outputs is not None and phases.reasoning is None):
            return False
        has_budget = phases.reasoning is not None and phases.reasoning.budget is not None
        return has_budget or self.structured_outputs is not None or phases.calls is not None

    @property
    def needs_token_on_host(self) -> bool:
        """True if sampling any token requires the previous token on the host.

        With rules for phases, only some tokens require it (:attr:`metal_engine.request.Request.needs_token_on_host`).
        """
        is_structured = self.structured_outputs is not None and not self.has_phase_rules
        return self.has_penalties or bool(self.bad_words) or is_structured

    def changed(self, **values: Any) -> SamplingParams:
        """Return a copy with other ``structured_outputs``, ``phases``, ``skip_special_tokens`` or ``stop_token_ids``.

        The other values have been validated already, and are shared. Raises ParameterError if the copy has
        ``structured_outputs`` and :attr:`excludes_grammars` is True.
        """
        new = copy(self)
        new._set(**values)
        new._check_structured_outputs()
        return new

    def seed_of(self, index: int) -> int | None:
        """Return the seed of output ``index`` of ``n``, within 64 bits; None without a seed."""
        if self.seed is None:
            return None
        return (self.seed + index + (1 << 63)) % (1 << 64) - (1 << 63)


# Parameters that exclude grammars: together they may allow no token.
_WITHOUT_GRAMMARS = ("allowed_token_ids", "bad_words", "ignore_eos")

PARAMETER_NAMES = tuple(f.name for f in fields(SamplingParams))


def _integer(name: str, value: Any, part: str = "") -> int:
    """Return an integer of Python or NumPy as an int. Raises ParameterError for other values, such as 1.0 and True.

    ``part`` is put before the error message. It names a part of the parameter, e.g. ``"entries "``.
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ParameterError(name, f"{part}must be an integer, got {short(value)}")


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _seed(name: str, value: Any) -> int | None:
    """Return a seed, or None if ``value`` is None or -1, as in vLLM."""
    seed = _integer_or_none(name, value)
    return None if seed == -1 else seed


def _number(name: str, value: Any, part: str = "") -> float:
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond the largest float
            return float(value)
    raise ParameterError(name, f"{part}must be a number, got {short(value)}")


# Parameter -> function that converts the value, test of the range, and the range in words. NaN is out of every range.
_NUMBERS: dict[str, tuple[Callable[[str, Any], Any], Callable[[Any], bool], str]] = {
    "n": (_integer, lambda n: 1 <= n <= MAX_N, f"be in [1, {MAX_N}]"),
    "max_tokens": (_integer_or_none, lambda n: n >= 1, "be at least 1"),
    "min_tokens": (_integer, lambda n: n >= 0, "be at least 0"),
    "temperature": (_number, lambda t: 0.0 <= t < math.inf, "be a number of at least 0"),
    "top_p": (_number, lambda p: 0.0 < p <= 1.0, "be in (0, 1]"),
    "top_k": (_integer, lambda k: k >= -1, "be -1 or 0 (off) or at least 1"),
    "min_p": (_number, lambda p: 0.0 <= p <= 1.0, "be in [0, 1]"),
    "repetition_penalty": (_number, lambda p: 1e-3 <= p <= 1e3, "be in [0.001, 1000]"),
    "presence_penalty": (_number, lambda p: -2.0 <= p <= 2.0, "be in [-2, 2]"),
    "frequency_penalty": (_number, lambda p: -2.0 <= p <= 2.0, "be in [-2, 2]"),
    "logprobs": (_integer_or_none, lambda n: 0 <= n <= MAX_LOGPROBS, f"be in [0, {MAX_LOGPROBS}]"),
    "thinking_token_budget": (_integer_or_none, lambda n: n >= 0, "be at least 0"),
    "prompt_logprobs": (_integer_or_none, lambda n: 0 <= n <= MAX_LOGPROBS, f"be in [0, {MAX_LOGPROBS}]"),
    "seed": (_seed, lambda seed: -(2**63) <= seed < 2**63, "fit in 64 bits"),
    "truncate_prompt_tokens": (_integer_or_none, lambda n: n == -1 or n >= 1, "be -1 or at least 1"),
}


def _check_type(name: str, value: Any, types: Any, kind: str) -> None:
    if not isinstance(value, types):
        raise ParameterError(name, f"must be {kind}, got {short(value)}")


def _check_size(name: str, size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise ParameterError(name, f"may have at most {limit} {unit}")


def _items(name: str, values: Any, kind: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ParameterError(name, f"must be a list of {kind}, got {short(values)}")
    return list(values)


def _strings(name: str, values: Any) -> tuple[str, ...]:
    items = [] if values is None else _items(name, values, "strings")
    for item in items:
        if not isinstance(item, str):
            raise ParameterError(name, f"must be a list of strings, got {short(item)} in it")
    return tuple(items)


def _token_id(name: str, value: Any, part: str) -> int:
    token_id = value if type(value) is int else _integer(name, value, part)
    if token_id < 0:
        raise ParameterError(name, f"has a negative token id: {short(token_id)}")
    return token_id


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    # Item by item, also below: a single call over a large list would block all other threads.
    return tuple(_token_id(name, item, "entries ") for item in _items(name, values, "token ids"))


def _biases(values: Any) -> Mapping[int, float] | None:
    """Return the biases by token id. Accepts ids as strings, because JSON keys are strings.

    Raises ParameterError if an id, a bias or the number of biases is invalid.
    """
    if values is None:
        return None
    _check_type("logit_bias", values, Mapping, "an object of token ids and numbers")
    _check_size("logit_bias", len(values), MAX_LOGIT_BIASES, "entries")
    biases = {}
    for key, value in values.items():
        if isinstance(key, str) and key.isdecimal() and len(key) < 20:
            key = int(key)
        token_id = _token_id("logit_bias", key, "keys ")
        bias = _number("logit_bias", value, "values ")
        if not -100.0 <= bias <= 100.0:
            raise ParameterError("logit_bias", f"must be in [-100, 100], got {bias} for token {token_id}")
        biases[token_id] = bias
    return biases
