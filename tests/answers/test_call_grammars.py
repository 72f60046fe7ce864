"""Grammars of tool calls: readers return exactly the calls that they allow. Golden answers test what they allow."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import pytest

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.call_syntaxes import lark
from metal_engine.answers.call_syntaxes.tool_schemas import tool_schemas
from metal_engine.answers.format_phases import call_phase
from metal_engine.answers.harmony import HarmonySplitter, harmony_format
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.answers.splitter import Splitter
from metal_engine.checkpoints.answer_formats import CALL_SYNTAXES
from metal_engine.errors import ParameterError
from metal_engine.grammars.call_grammar import CallGrammar
from tests.support.call_walks import describe, random_tools, vocabulary, walk
from tests.support.splitting import answer_format, run

FORMATS = [*sorted(CALL_SYNTAXES), "harmony"]
KINDS = ("plain", "special")


def format_of(name: str) -> AnswerFormat:
    return harmony_format() if name == "harmony" else answer_format(name)


def splitter(name: str, tools: list[dict], *, incremental: bool = False) -> Splitter:
    return (HarmonySplitter if name == "harmony" else MarkSplitter)(format_of(name), tools, incremental=incremental)


def closers(name: str) -> list[str]:
    """Return a list with the text that ends a value in a format."""
    syntax = format_of(name).syntax
    return [getattr(syntax, "value_end", getattr(syntax, "quote", '"'))]


def check_walk(name: str, kind: str, seed: int) -> bool:
    """Check a random call. Return False if it has no end."""
    rng = random.Random(f"{name} {kind} {seed}")
    tools = random_tools(rng)
    parallel = rng.random() < 0.7
    phase = call_phase(format_of(name), tools, parallel=parallel)
    assert phase is not None, describe(tools)
    trigger = rng.choice(phase.triggers)
    opened = [i for i in range(len(trigger.arguments)) if rng.random() < 0.1]
    trigger = replace(trigger, grammar=json.loads(CallGrammar(trigger, vocabulary(kind).ids).wanted(opened))["call"])
    open_tools = {trigger.arguments[i].rule for i in opened}
    rest = walk(rng, vocabulary(kind), trigger, closers(name), rng.choice([0, 10, 40, 120]))
    if rest is None:
        return False
    text = trigger.mark + rest
    where = f"{describe(tools)}\n{text}"
    content, _, calls, _ = run(splitter(name, tools), [text])
    assert calls and not content, where
    assert parallel or len(calls) == 1, where
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    schemas |= {one.tool: {} for one in trigger.arguments if one.rule in open_tools}
    for called, arguments in calls:
        try:
            jsonschema.validate(arguments, schemas[called])
        except jsonschema.ValidationError as error:
            raise AssertionError(f"{where}\n{error.message}") from error
    at = rng.randint(0, len(text))
    for parts in (list(text), [text[:at], text[at:]]):
        again = run(splitter(name, tools, incremental=rng.random() < 0.5), parts)
        assert (again[0], json.dumps(again[2])) == (content, json.dumps(calls)), where
    return True


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_walks", [10, pytest.param(667, marks=pytest.mark.full)])
def test_random_calls_are_read_and_valid(name: str, num_walks: int) -> None:
    assert sum(check_walk(name, KINDS[seed % 2], seed) for seed in range(num_walks)) >= 0.9 * num_walks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_values_with_the_texts_of_special_tokens(name: str, kind: str) -> None:
    """They are plain text within a call, and are read back exactly, or the request is refused."""
    known = format_of(name)
    assert known.tool is not None
    marks = {*closers(name), *getattr(known.syntax, "without", ())} - {'"'}
    inexpressible = set() if name == "kimi_k3" else marks  # it also writes arguments as JSON
    for text in sorted({"<|im_end|>", known.tool.tool_call_start, known.tool.tool_call_end, "<think>", *marks}):
        value = f"a {text} b"
        schema = {"type": "object", "properties": {"x": {"enum": [value]}}, "required": ["x"]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        if any(mark in value for mark in inexpressible):
            with pytest.raises(ParameterError, match="requires a text with") as caught:
                call_phase(known, tools, parallel=True)
            assert caught.value.name == "tools[0].function.parameters"
            continue
        phase = call_phase(known, tools, parallel=False)
        assert phase is not None and phase.triggers[0].arguments
        for seed in range(2):
            rest = walk(random.Random(seed), vocabulary(kind), phase.triggers[0], closers(name), 0)
            assert rest is not None
            for parts in ([phase.triggers[0].mark + rest], list(phase.triggers[0].mark + rest)):
                content, _, calls, _ = run(splitter(name, tools), parts)
                assert (content, calls) == ("", [("f", {"x": value})])


def test_a_rule_that_was_too_long_is_defined_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark, "_MAX_LENGTH", 50)
    rules, (tool,) = lark.GrammarRules(), tool_schemas([{"function": {"name": "f"}}])
    assert rules.arguments(tool, lambda given: "open" if given is tool.opened else rules.rule('"a"' * 20)) == "r2"
    name = rules.rule('"a"' * 20)
    assert name != "r2" and f"\n{name}: " in rules.trigger("<call>", "r2").grammar
