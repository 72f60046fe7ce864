"""Random texts that a grammar of tool calls allows, and random tools for them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from metal_engine.grammars.marks import without_marks
from metal_engine.grammars.next_mask import next_mask
from metal_engine.output_phases import CallTrigger
from tools.fixtures.fake_engine import byte_tokens

# Texts that are special tokens in the second vocabulary.
SPECIAL = (
    "<|im_end|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|open|>", "<|close|>", "<|sep|>",
    "<minimax:tool_call>", "</minimax:tool_call>", "<|tool_call_start|>", "<start_function_call>",
    "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel|>", "<|message|>",
    "<|call|>", "<|constrain|>", "<|start|>", "<|end|>", "<|return|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>",
)  # fmt: skip
# Texts that a walk writes at once if the grammar allows them.
SNIPPETS = (
    "</tool_call>", "</parameter>", "</function>", "<|call|>", "<|end|>", "[TOOL_CALLS]", "</arg_value>", "<escape>",
    "<tool_call|>", "<|tool_call_end|>", "</minimax:tool_call>", "<|close|>", "</param>", "</atem:parameter>", "\n",
    '\\"', "'", "é", "😀", "\\n", "null", "True", "12", "-3.5", "[1]", "{}", " ", "<", "it's", "\\\\", "]]>", "1e999",
    "</｜DSML｜parameter>", "<｜DSML｜parameter", "</", "```<｜tool▁call▁end｜>",
)  # fmt: skip
_CLOSING = b'"}])>'


class Vocabulary:
    """The 256 bytes as tokens, and special tokens.

    Args:
        special: texts of the special tokens. The first one ends generation.
    """

    def __init__(self, special: Sequence[str]) -> None:
        backend = BackendTokenizer(BPE({token: i for i, token in enumerate(byte_tokens())}, []))
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = ByteLevelDecoder()
        backend.add_special_tokens([AddedToken(token, special=True) for token in special])
        self.ids = {text: 256 + i for i, text in enumerate(special)}
        self.size = 256 + len(special)
        self._texts = list(special)
        self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=self.size, eos_token=[256], slices=[])

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher for the rule ``call`` of a grammar with marks."""
        rules = "start: call\n" + without_marks(grammar, self.ids)
        matcher = LLMatcher(self._tokenizer, llguidance.grammar_from("lark", rules))
        assert not matcher.is_error(), (matcher.get_error(), rules)
        return matcher

    def tokens(self, text: str) -> list[int]:
        """Return the special tokens and the bytes of a text."""
        tokens: list[int] = []
        at = 0
        while at < len(text):
            found = max((one for one in self.ids if text.startswith(one, at)), key=len, default="")
            tokens += [self.ids[found]] if found else list(text[at].encode())
            at += len(found) or 1
        return tokens

    def text(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self._texts[token - 256].encode()

    def allowed(self, matcher: LLMatcher) -> np.ndarray:
        mask = np.frombuffer(next_mask(matcher, self._tokenizer), np.uint8)
        return np.flatnonzero(np.unpackbits(mask, bitorder="little")[: self.size])


@cache
def vocabulary(kind: str) -> Vocabulary:
    """Return a vocabulary. ``kind`` is "special" if marks of the formats are special tokens, or "plain" for bytes."""
    return Vocabulary(SPECIAL if kind == "special" else SPECIAL[:1])


def accepts(vocab: Vocabulary, trigger: CallTrigger, text: str) -> bool:
    """Return True if a text after the trigger's mark is a whole call of its grammar, which nothing can extend."""
    matcher = vocab.matcher(trigger.grammar)
    tokens = vocab.tokens(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting() and matcher.is_stopped()


def called(vocab: Vocabulary, triggers: Sequence[CallTrigger], text: str) -> int:
    """Return the number of calls in a text, each of which begins with the mark of a trigger.

    Asserts that the trigger's grammar allows each call. If a grammar refuses a special token, the bytes of the token's
    text take its place.
    """
    num_marks = 0
    while found := [(text.index(one.mark), -len(one.mark), i) for i, one in enumerate(triggers) if one.mark in text]:
        at, length, i = min(found)
        num_marks += 1
        text = text[at - length :]
        matcher = vocab.matcher(triggers[i].grammar)
        written = b""
        for token in vocab.tokens(text):
            tokens = [token] if matcher.validate_tokens([token]) else list(vocab.text(token))
            assert matcher.try_consume_tokens(tokens) == len(tokens), (written.decode(errors="replace"), text)
            written += vocab.text(token)
            if matcher.is_stopped():
                break
        assert matcher.is_accepting() and matcher.is_stopped(), text
        text = text[len(written.decode()) :]
    return num_marks


def walk(
    rng: random.Random, vocab: Vocabulary, trigger: CallTrigger, closers: Sequence[str], num_free: int
) -> str | None:
    """Return the result of :func:`walk_tokens` as text: a random text that the grammar allows, or None."""
    tokens = walk_tokens(rng, vocab, trigger, closers, num_free)
    return None if tokens is None else b"".join(map(vocab.text, tokens)).decode()


def walk_tokens(
    rng: random.Random, vocab: Vocabulary, trigger: CallTrigger, closers: Sequence[str], num_free: int
) -> list[int] | None:
    """Return random tokens that the trigger's grammar allows; None if the call does not end within 4,000 steps.

    Args:
        closers: texts that end values and calls in the format. They are preferred after ``num_free`` tokens.
        num_free: number of random tokens.
    """
    matcher = vocab.matcher(trigger.grammar)
    written, tokens = b"", []
    for step in range(4000):
        if matcher.is_stopped():
            assert matcher.is_accepting() and not matcher.is_error(), matcher.get_error()
            return tokens
        is_free = step < num_free
        if is_free and rng.random() < 0.15:
            snippet = list(rng.choice(SNIPPETS).encode())
            if matcher.validate_tokens(snippet) == len(snippet):
                assert matcher.consume_tokens(snippet)
                written += bytes(snippet)
                tokens += snippet
                continue
        allowed = vocab.allowed(matcher)
        token = _choose(rng, allowed, written, closers, is_free)
        assert matcher.consume_token(token), matcher.get_error()
        written += vocab.text(token)
        tokens.append(token)
    return None


def _choose(rng: random.Random, allowed: np.ndarray, written: bytes, closers: Sequence[str], is_free: bool) -> int:
    tokens = [int(token) for token in allowed if token != 256] or [256]
    if is_free:
        letters = [token for token in tokens if 97 <= token < 123 or token >= 256]
        return rng.choice(letters if letters and rng.random() < 0.6 else tokens)
    marks = [token for token in tokens if token > 256]
    if marks:
        # In a closing tag, the special token may follow ``</``.
        is_tag = written.endswith(b"<") and ord("/") in tokens
        return rng.choice([*marks, ord("/")] if is_tag else marks)
    wanted = (1, -1)
    for closer in map(str.encode, closers):
        for length in range(len(closer) - 1, 0, -1):
            if written.endswith(closer[:length]):
                if closer[length] in tokens:
                    wanted = max(wanted, (length, closer[length]))
                break
    if wanted[1] >= 0:
        return wanted[1]
    starts = [closer.encode()[0] for closer in closers if closer.encode()[0] in tokens]
    closing = [token for token in tokens if token in _CLOSING]
    return rng.choice(closing + starts or tokens)


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Return tools with random schemas, in OpenAI's form."""
    tools = []
    for name in rng.sample(["get_weather", "find_trains", "edit", "run-it"], rng.randint(1, 3)):
        function: dict[str, Any] = {"name": name}
        if rng.random() < 0.9:
            function["parameters"] = _object(rng, 2)
        if rng.random() < 0.3:
            function["strict"] = rng.random() < 0.5
        tools.append({"type": "function", "function": function})
    return tools


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["city", "days", "text", "old_string", "größe", "options", "x"], rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    if rng.random() < 0.7:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.3:
        schema["additionalProperties"] = rng.choice([False, True, {"type": "integer"}])
    return schema


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema that jsonschema and the grammars understand alike."""
    compound = [
        lambda: _object(rng, depth - 1),
        lambda: {"type": "array", "items": random_schema(rng, depth - 1), **_lengths(rng, "minItems", "maxItems")},
        lambda: {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]},
    ]
    scalar = [
        lambda: {"type": "string"},
        lambda: {"type": "string"},
        lambda: {"type": "string", **_lengths(rng, "minLength", "maxLength")},
        lambda: {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        lambda: {"type": "integer"},
        lambda: {"type": "integer", "minimum": -3, "maximum": 40},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": ["string", "null"]},
        lambda: {"type": ["integer", "string"], "minimum": 5},
        lambda: {"enum": rng.sample(["a b", "", "1", "\n", "true", "ü😀", 'say "x"', "a@b", 1, 2.5, True, None], 3)},
        lambda: {"const": rng.choice(["x", 7, None])},
        dict,
    ]
    return rng.choice(scalar + (compound * 3 if depth > 0 else []))()


def _lengths(rng: random.Random, low: str, high: str) -> dict[str, int]:
    least = rng.randint(0, 2)
    return {low: least, high: least + rng.randint(0, 3)} if rng.random() < 0.6 else {}


def describe(tools: Sequence[dict[str, Any]]) -> str:
    return json.dumps(tools, ensure_ascii=False)
