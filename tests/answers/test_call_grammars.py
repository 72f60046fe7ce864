"""Grammars of tool calls: they allow the calls that models write, and readers return exactly the calls they allow."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import pytest

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.harmony import HarmonySplitter, harmony_format
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.answers.phases import call_phase
from metal_engine.answers.splitter import Splitter
from metal_engine.checkpoints.answer_formats import CALL_SYNTAXES
from metal_engine.grammars.call_grammar import CallGrammar
from tests.support.call_walks import accepts, describe, random_tools, vocabulary, walk
from tests.support.exact_calls import EXACT, EXACT_TOOLS, MARKS, NESTED_MARKS
from tests.support.splitting import answer_format, cuts, run
from tests.support.tool_formats import RECORDED, TOOLS, Recorded

FORMATS = [*sorted(CALL_SYNTAXES), "harmony"]
KINDS = ("plain", "special")
JSON_CALL = next(one for one in EXACT if one.parser == "json_tools")


def format_of(name: str) -> AnswerFormat:
    return harmony_format() if name == "harmony" else answer_format(name)


def splitter(name: str, tools: list[dict], *, incremental: bool = False) -> Splitter:
    make = HarmonySplitter if name == "harmony" else MarkSplitter
    return make(format_of(name), tools, incremental=incremental)


def closers(name: str) -> list[str]:
    """Return the texts that end values and calls in a format."""
    syntax = format_of(name).syntax
    return [getattr(syntax, "value_end", getattr(syntax, "quote", '"'))]


def trigger_of(name: str, text: str, tools: list[dict], *, parallel: bool = True):
    """Return the trigger that occurs first in a text, and the text after it."""
    found = []
    for trigger in call_phase(format_of(name), tools, parallel=parallel).triggers:
        if trigger.mark in text:
            at = text.index(trigger.mark)
            found.append((at, -len(trigger.mark), trigger, text[at + len(trigger.mark) :]))
    return min(found, key=lambda one: one[:2])[2:]


def blocks(recorded: Recorded) -> list[str]:
    """Return the texts of a recorded output from each opening mark up to the next one."""
    mark = format_of(recorded.parser).tool.tool_call_start
    return [mark + part.strip() for part in recorded.text.split(mark)[1:]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: one.parser)
def test_recorded_calls_are_allowed(recorded: Recorded, kind: str) -> None:
    for block in blocks(recorded):
        trigger, rest = trigger_of(recorded.parser, block, TOOLS)
        assert accepts(vocabulary(kind), trigger, rest), rest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", EXACT, ids=lambda one: one.parser)
def test_exact_calls_are_allowed(exact: Recorded, kind: str) -> None:
    if kind == "special" and exact in NESTED_MARKS:
        return
    trigger, rest = trigger_of(exact.parser, exact.text, EXACT_TOOLS)
    # Marks within a string are plain text to the model, which the vocabulary with special tokens cannot spell here.
    rest = rest if kind == "plain" else rest.replace(f": {MARKS[exact.parser]} 'x'", "")
    assert accepts(vocabulary(kind), trigger, rest), rest


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("exact", EXACT, ids=lambda one: one.parser)
def test_exact_calls_are_read(exact: Recorded, incremental: bool) -> None:
    for parts in cuts(exact.text):
        content, _, calls, ids = run(splitter(exact.parser, EXACT_TOOLS, incremental=incremental), parts)
        assert (content, calls) == ("", exact.calls), parts
        assert not exact.ids or ids == exact.ids


@pytest.mark.parametrize("exact", EXACT, ids=lambda one: one.parser)
def test_exact_calls_that_are_cut_off(exact: Recorded) -> None:
    for end in range(1, len(exact.text) - 1):
        calls = run(splitter(exact.parser, EXACT_TOOLS), [exact.text[:end]], truncated=True)[2]
        assert calls == exact.calls[: len(calls)]


def test_text_around_calls_with_marks_in_strings() -> None:
    call = JSON_CALL.text
    for parts in ([f"Hm.\n{call}\n{call} So."], list(f"Hm.\n{call}\n{call} So.")):
        content, _, calls, _ = run(splitter("json_tools", EXACT_TOOLS), parts)
        assert (content, calls) == ("Hm.\nSo.", JSON_CALL.calls * 2)


def test_a_string_without_an_end_does_not_hide_later_calls() -> None:
    text = '<tool_call>{"name": "edit", "arguments": {"path": "a}}</tool_call>'
    call = '<tool_call>{"name": "list_all", "arguments": {}}</tool_call>'
    for parts in cuts(text + call):
        assert run(splitter("json_tools", EXACT_TOOLS), parts)[:3] == (text, "", [("list_all", {})])


def check_walk(name: str, kind: str, seed: int) -> bool:
    """Check a random call. Return False if it has no end."""
    rng = random.Random(f"{name} {kind} {seed}")
    tools = random_tools(rng)
    parallel = rng.random() < 0.7
    phase = call_phase(format_of(name), tools, parallel=parallel)
    assert phase is not None, describe(tools)
    trigger = rng.choice(phase.triggers)
    opened = [i for i in range(len(trigger.arguments)) if rng.random() < 0.1]
    wanted = json.loads(CallGrammar(trigger, vocabulary(kind).ids).wanted(opened))
    trigger = replace(trigger, grammar=wanted["call"])
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


def check_walks(name: str, num_walks: int) -> None:
    ended = [check_walk(name, KINDS[seed % 2], seed) for seed in range(num_walks)]
    assert sum(ended) >= 0.9 * num_walks


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_walks", [20, pytest.param(667, marks=pytest.mark.full)])
def test_random_calls_are_read_and_valid(name: str, num_walks: int) -> None:
    check_walks(name, num_walks)
