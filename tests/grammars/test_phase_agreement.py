"""The reader of an output's text and the sampler's rules agree on the phase of every token."""

from __future__ import annotations

import codecs
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.format_phases import call_phase, reasoning_phase
from metal_engine.answers.harmony import HarmonySplitter
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.engine.phase_rules_maker import PhaseRulesMaker
from metal_engine.grammars.call_grammar import CallGrammar
from metal_engine.grammars.grammar_client import SegmentEnd
from metal_engine.grammars.phase_matcher import PhaseMatcher
from metal_engine.grammars.source import grammar_source
from metal_engine.output_phases import CallPhase, OutputPhases, ReasoningPhase
from metal_engine.text.tokenizer import Tokenizer
from tests.answers.test_call_grammars import FORMATS, KINDS, closers, format_of
from tests.support.call_walks import Vocabulary, random_tools, vocabulary, walk_tokens

# Ids of the demo model's tokens begin here. Lower ids are those of the vocabulary of the grammars.
_FIRST_ID = 1000
_HEADERS = {"reasoning": "<|channel|>analysis<|message|>", "content": "<|channel|>final<|message|>"}
_WORDS = (
    "So", " the", " 1 < 2", "\n", "\n\n", " ", "…", "é", "😀", "{", "}", '"', "'", "[", "](", "</", ">", "<|", "|>",
)  # fmt: skip


class Tokens:
    """The demo model's vocabulary with the special tokens of a smaller one."""

    def __init__(self, demo: Tokenizer, vocab: Vocabulary) -> None:
        self._demo = demo
        self._vocab = vocab
        self.special_token_texts = vocab.ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocab.text(token_id) if token_id < _FIRST_ID else self._demo.token_bytes(token_id - _FIRST_ID)

    def cut(self, rng: random.Random, part: Sequence[int]) -> list[int]:
        """Return the tokens of a text that is cut at random places, also within marks and characters.

        Args:
            part: bytes and special tokens of the text.
        """
        tokens: list[int] = []
        raw = b""
        for token in part:
            if token < 256 and rng.random() < 0.85:
                raw += bytes([token])
                continue
            tokens += [*self._pieces(raw), token]
            raw = b""
        return tokens + self._pieces(raw)

    def _pieces(self, raw: bytes) -> list[int]:
        pieces = [_FIRST_ID + one for one in self._demo.encode(raw.decode("utf-8", "ignore"), add_special_tokens=False)]
        # Some characters, and parts of characters, are only bytes.
        return pieces if b"".join(map(self.token_bytes, pieces)) == raw else list(raw)


class LocalGrammars:
    """Stands for the compiler of grammars, whose processes would take long to start."""

    def __init__(self, tokens: Tokens, vocab: Vocabulary) -> None:
        self._tokens = tokens
        self._vocab = vocab

    def compile_call(self, grammar: CallGrammar) -> LocalGrammar:
        source = grammar_source(json.loads(grammar.wanted(())))
        return LocalGrammar(self._tokens, LLMatcher(self._vocab._tokenizer, source))


class LocalGrammar:
    def __init__(self, tokens: Tokens, compiled: LLMatcher) -> None:
        self._tokens = tokens
        self._compiled = compiled
        self._end: int | None = None

    def result(self, deadline: float) -> LocalGrammar:
        return self

    def matcher(self) -> LocalGrammar:
        return LocalGrammar(self._tokens, self._compiled.deep_copy())

    def consume(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        for i, token_id in enumerate(token_ids):
            if self._compiled.is_stopped():
                self._end = i
                return
            whole = [token_id] if token_id < _FIRST_ID else list(self._tokens.token_bytes(token_id))
            assert self._compiled.consume_tokens(whole), (
                self._compiled.get_error(),
                self._tokens.token_bytes(token_id),
            )
        self._end = len(token_ids) if self._compiled.is_stopped() else None

    def allows(self, token_id: int) -> bool:
        whole = [token_id] if token_id < _FIRST_ID else list(self._tokens.token_bytes(token_id))
        return self._end is not None or self._compiled.validate_tokens(whole) == len(whole)

    def fill_mask(self, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        if self._end is not None:
            raise SegmentEnd(self._end)
        return True


def random_text(rng: random.Random, marks: Sequence[str], avoided: Sequence[str]) -> str:
    """Return words and parts of marks, without any of the ``avoided`` texts."""
    parts = []
    for _ in range(rng.randint(0, 8)):
        part = rng.choice(_WORDS)
        if rng.random() < 0.4:
            mark = rng.choice(marks)
            part = mark if rng.random() < 0.3 else mark[: rng.randrange(len(mark))] + rng.choice(_WORDS)
        if not any(mark in "".join([*parts, part, "<"]) for mark in avoided):
            parts.append(part)
    return "".join(parts)


class Answer:
    """Random answer in a format.

    Attributes:
        parts: bytes and special tokens of the answer. A token never belongs to a call and the part after it.
        is_whole_call: True if the whole content is a call.
    """

    def __init__(
        self, rng: random.Random, known: AnswerFormat, vocab: Vocabulary, calls: CallPhase, reasoning: ReasoningPhase,
        ends: Sequence[str],
    ) -> None:  # fmt: skip
        self.parts: list[list[int]] = [[]]
        self.is_whole_call = False
        has_content = False
        self._vocab = vocab
        tool = known.tool
        assert tool is not None
        triggers = [trigger.mark for trigger in calls.triggers]
        marks = [*triggers, reasoning.start, reasoning.end, tool.tool_call_end or tool.tool_call_start]
        in_reasoning = reasoning.begins_inside
        for _ in range(rng.randint(1, 6)):
            kind = "reasoning" if in_reasoning else rng.choice(["reasoning", "content", "call", "call"])
            if kind == "reasoning":
                text = random_text(rng, marks, [reasoning.end, *(("<|",) if known.harmony else ())])
                self._add(("" if in_reasoning else reasoning.start) + text + reasoning.end)
                in_reasoning = False
            elif kind == "content":
                bare = [known.bare.before] if known.bare is not None else []
                text = random_text(rng, marks, [*triggers, reasoning.start, *bare, *(("<|",) if known.harmony else ())])
                self._add(f"{_HEADERS['content']}{text}<|end|>" if known.harmony else text)
            else:
                trigger = rng.choice([one for one in calls.triggers if not (one.is_whole and has_content)])
                rest = walk_tokens(rng, vocab, trigger, ends, rng.choice([0, 10, 40]))
                if rest is None:
                    continue
                self._add(trigger.mark)
                self.parts[-1] += rest
                self.parts.append([])
                if trigger.is_whole:
                    self.is_whole_call = True
                    break
            # In gpt-oss's format, the whole call is the continuation of the prompt's last message.
            has_content |= kind != "reasoning" or known.harmony
            if known.harmony:
                self._add("<|start|>assistant")

    def _add(self, text: str) -> None:
        self.parts[-1] += self._vocab.tokens(text)


def sampled_phase(matcher: PhaseMatcher) -> str:
    segment = matcher._segment
    return "call" if segment is not None and not segment.is_partial else matcher._scanner.phase


def read_phase(reader: MarkSplitter) -> str:
    """Return the reader's phase; an empty text while more text decides it."""
    if isinstance(reader, HarmonySplitter) and reader._in_header:
        return ""
    bare = reader._bare
    if bare is not None and reader._state == "content" and bare.overlap(reader._text):
        return ""
    # Without a mark after it, a call ends with the next call.
    assert reader._tool is not None
    return "" if reader._state == "call" and not reader._tool.tool_call_end else reader._state


def check_answer(demo: Tokenizer, name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    vocab = vocabulary(KINDS[seed % 2])
    known, tools = format_of(name), random_tools(rng)
    calls = call_phase(known, tools, parallel=True)
    reasoning = reasoning_phase(known, begins_inside=rng.random() < 0.5, is_structured=False, budget=None)
    assert calls is not None and reasoning is not None
    reasoning = replace(reasoning, is_past=not reasoning.begins_inside and rng.random() < 0.5)
    tokens = Tokens(demo, vocab)
    answer = Answer(rng, known, vocab, calls, reasoning, closers(name))
    maker: Any = PhaseRulesMaker(tokens, LocalGrammars(tokens, vocab))  # type: ignore[arg-type]
    matcher = maker.rules_for(OutputPhases(reasoning, calls), None, np.array([0], np.int32)).matcher()
    make = HarmonySplitter if known.harmony else MarkSplitter
    reader = make(known, tools, in_reasoning=reasoning.begins_inside, drops_end=reasoning.drops_end)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    mask, so_far = np.zeros(64, np.int32), ""
    for part in answer.parts:
        for token in tokens.cut(rng, part):
            segment = matcher._segment
            if segment is not None and isinstance(segment.matcher, LocalGrammar):
                assert segment.matcher.allows(token), f"{tools}\n{so_far} -> {tokens.token_bytes(token)!r}"
            matcher.consume([token])
            matcher.fill_mask(mask, math.inf)
            text = decode(tokens.token_bytes(token))
            so_far += text
            reader.add(text)
            read, sampled = read_phase(reader), sampled_phase(matcher)
            # A call that is the whole content ends with the output, which only the sampler can tell.
            has_ended = answer.is_whole_call and (read, sampled) == ("call", "content")
            assert has_ended or read in ("", sampled), f"{tools}\n{so_far}"
    assert matcher.num_unconstrained_calls == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_answers", [10, pytest.param(667, marks=pytest.mark.full)])
def test_the_phase_of_every_token(demo_tokenizer: Tokenizer, name: str, num_answers: int) -> None:
    for seed in range(num_answers):
        check_answer(demo_tokenizer, name, seed)
