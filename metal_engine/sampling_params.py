"""How to generate: :class:`SamplingParams`, checked where it is made. Names and meanings are vLLM's."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

# Far beyond any use; what a request may cost in memory beside its tokens.
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARACTERS = 16_384
MAX_LOGIT_BIASES = 16_384
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_GRAMMAR_CHARACTERS = 131_072
MAX_CHOICES = 1_024
# As many alternatives as OpenAI gives, and as many choices.
MAX_LOGPROBS = 20
MAX_N = 128


class Matcher(Protocol):
    """Where one output stands in its grammar. Belongs to one request; used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """Go on past a token that the output has been given. Raises ValueError if the grammar forbids it."""
        ...

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write which tokens may come next: bit ``i % 32`` of word ``i // 32`` of ``mask``, [W] int32.

        Raises:
            ValueError: the grammar got too complex to go on.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by the requests that ask for it."""

    def matcher(self) -> Matcher:
        """One at the beginning of an output."""
        ...


@dataclass(frozen=True)
class TokenRules:
    """What sampling parameters mean in the tokens of one model.

    Attributes:
        stop_token_ids: what may not come before ``min_tokens`` tokens.
        bad_words: token sequences that may not come.
        grammar: what the whole output must match.
    """

    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole output must match: exactly one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar``.

    Attributes:
        json: a JSON schema, as an object or as text.
        json_object: any JSON object.
        regex: a regular expression, of Rust's ``regex`` syntax.
        choice: one of these texts.
        grammar: a context-free grammar, in Lark's or GBNF's syntax.
        disable_any_whitespace: JSON without white space between its tokens.
        whitespace_pattern: a regular expression for the white space between JSON's tokens.

    Raises:
        ValueError: none or several are given, or one is no grammar by its type or size.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) not in (None, ())]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(kinds)}; "
                f"got {' and '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"structured_outputs.{name} must be a string, got {_short(value)}")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ValueError(f"structured_outputs.{name} must be true or false, got {_short(value)}")
        if not isinstance(self.json, str | Mapping | bool | None):
            raise ValueError(
                f"structured_outputs.json must be a JSON schema (an object), got {_short(self.json)}"
            )
        if len(self.choice or ()) > MAX_CHOICES:
            raise ValueError(f"structured_outputs.choice may have {MAX_CHOICES} entries")
        size = sum(len(text) for text in (self.regex, self.grammar, self.whitespace_pattern) if text)
        if size + len(self.schema_text or "") + sum(map(len, self.choice or ())) > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(f"structured_outputs may have {MAX_GRAMMAR_CHARACTERS} characters")

    @property
    def schema_text(self) -> str | None:
        """The JSON schema as JSON, if one is given."""
        if self.json is None or isinstance(self.json, str):
            return self.json
        try:
            return json.dumps(self.json)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.json is no JSON: {error}") from error


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate. Names and meanings are vLLM's.

    Logits are edited in this order: structured output and ``allowed_token_ids``, ``bad_words``, ``min_tokens``,
    ``logit_bias``, penalties; then divided by the temperature; then cut by ``min_p``, ``top_k`` and ``top_p``.

    Raises:
        ValueError: a value is of the wrong type or out of range; the message begins with the parameter's name.
    """

    n: int = 1
    """Outputs to generate for each prompt. With a seed, output ``i`` is generated with ``seed + i``."""
    max_tokens: int | None = 16
    """Tokens to generate at most; ``None`` means until ``max_model_len``."""
    min_tokens: int = 0
    """Neither end of sequence, nor a stop token, nor a stop string ends generation before so many tokens."""
    temperature: float = 1.0
    """0 is greedy. Logits are divided by this after penalties and biases, and before anything is cut."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the output are divided by this if positive, else multiplied; 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens in the output, once for each time they are there; -2 to 2."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Token id -> what is added to its logit; -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that may be generated."""
    bad_words: tuple[str, ...] = ()
    """Words that may not be generated: the last token of each is excluded where the others stand before it."""
    seed: int | None = None
    """Same seed, same prompt, same parameters: same draws, whatever else runs in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end generation; the text is cut before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, besides the model's own end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string, or after the stop token's text, instead of before it."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Give each output token's log probability, and those of this many most likely tokens (0 to 20).

    They are of the model's own distribution: before penalties, biases, masks and temperature.
    """
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The prompt is then computed whole, without cached prefixes."""
    truncate_prompt_tokens: int | None = None
    """Keep so many of the prompt's last tokens; -1 keeps as many as fit beside ``max_tokens``."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must match."""
    rules: TokenRules | None = field(default=None, repr=False, compare=False)
    """What all this means in the model's tokens; filled in by :meth:`metal_engine.engine.core.EngineCore.resolve`."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set(
            stop=_strings("stop", stop),
            stop_token_ids=_token_ids("stop_token_ids", self.stop_token_ids) or (),
            bad_words=_strings("bad_words", self.bad_words),
            allowed_token_ids=_token_ids("allowed_token_ids", self.allowed_token_ids),
            logit_bias=_biases(self.logit_bias),
        )
        for name in ("n", "min_tokens", "top_k"):
            self._set(**{name: _integer(name, getattr(self, name))})
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(self, name) is not None:
                self._set(**{name: _integer(name, getattr(self, name))})
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            self._set(**{name: _number(name, getattr(self, name))})
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {_short(getattr(self, name))}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError("structured_outputs must be StructuredOutputsParams")
        self._check_ranges()
        self._check_sizes()

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be in [1, {MAX_N}], got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise ValueError(f"repetition_penalty must be in [0.001, 1000], got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be in [0, {MAX_LOGPROBS}], got {getattr(self, name)}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")
        truncate = self.truncate_prompt_tokens
        if truncate is not None and truncate != -1 and truncate < 1:
            raise ValueError(f"truncate_prompt_tokens must be -1 or at least 1, got {truncate}")
        if self.structured_outputs is not None:
            for name in ("allowed_token_ids", "bad_words", "ignore_eos"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} and structured_outputs exclude each other: what is left may be nothing"
                    )

    def _check_sizes(self) -> None:
        for name in ("stop", "bad_words"):
            if any(not text.strip() if name == "bad_words" else not text for text in getattr(self, name)):
                raise ValueError(f"{name} cannot contain an empty string")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop strings may have {MAX_STOP_CHARACTERS} characters together")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} entries")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words may have {MAX_BAD_WORDS} entries")
        if sum(map(len, self.bad_words)) > MAX_BAD_WORD_CHARACTERS:
            raise ValueError(f"bad_words may have {MAX_BAD_WORD_CHARACTERS} characters together")
        if (
            self.allowed_token_ids is not None
            and not 1 <= len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS
        ):
            raise ValueError(f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} entries")
        if len(self.logit_bias or ()) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias may have {MAX_LOGIT_BIASES} entries")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature: what plain requests do not pay for."""
        return (
            self.has_penalties
            or bool(self.logit_bias)
            or bool(self.bad_words)
            or self.allowed_token_ids is not None
            or self.min_tokens > 0
            or self.structured_outputs is not None
        )

    @property
    def needs_token_on_host(self) -> bool:
        """Whether a token can only be sampled once the one before it is known on the host."""
        return self.has_penalties or bool(self.bad_words) or self.structured_outputs is not None

    @property
    def needs_rules(self) -> bool:
        """Whether :attr:`rules` must be filled in before the request can run."""
        return self.min_tokens > 0 or bool(self.bad_words) or self.structured_outputs is not None

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise ValueError for a token id that a model with so many does not have."""
        for name, ids in (("allowed_token_ids", self.allowed_token_ids), ("logit_bias", self.logit_bias)):
            if ids and max(ids) >= vocab_size:
                raise ValueError(f"{name} has token id {max(ids)}, outside the vocabulary of {vocab_size}")

    def for_choice(self, index: int) -> SamplingParams:
        """Parameters of output ``index`` of ``n``."""
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None:
            seed = (seed + index + (1 << 63)) % (1 << 64) - (1 << 63)  # within 64 bits
        return replace(self, n=1, seed=seed)


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PARAMETER_NAMES = tuple(f.name for f in fields(SamplingParams) if f.name != "rules")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(name: str, value: Any) -> int:
    """An int, of anything that is one exactly (NumPy's are)."""
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"{name} must be an integer, got {_short(value)}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{name} must be a number, got {_short(value)}")


def _items(name: str, values: Any, kind: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of {kind}, got {_short(values)}")
    return list(values)


def _strings(name: str, values: Any) -> tuple[str, ...]:
    items = [] if values is None else _items(name, values, "strings")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name} must be a list of strings, got {_short(item)} in it")
    return tuple(items)


def _token_ids(name: str, values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    ids = tuple(_integer(f"{name} entries", item) for item in _items(name, values, "token ids"))
    if ids and min(ids) < 0:
        raise ValueError(f"{name} has a negative token id: {min(ids)}")
    return ids


def _biases(values: Any) -> Mapping[int, float] | None:
    """Biases by token id; the ids may be strings, as JSON has no other keys."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias must be an object of token ids and numbers, got {_short(values)}")
    biases = {}
    for key, value in values.items():
        if isinstance(key, str) and key.isdecimal() and len(key) < 20:
            key = int(key)
        token_id = _integer("logit_bias keys", key)
        bias = _number("logit_bias values", value)
        if token_id < 0:
            raise ValueError(f"logit_bias has a negative token id: {token_id}")
        if not -100.0 <= bias <= 100.0:
            raise ValueError(f"logit_bias must be in [-100, 100], got {bias} for token {token_id}")
        biases[token_id] = bias
    return biases
