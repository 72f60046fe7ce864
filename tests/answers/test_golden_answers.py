"""Outputs of models in all known formats, with the answers that other servers' users expect: whole, and cut anywhere.

The cases are in ``golden``, a file for each format.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from itertools import product

import pytest

from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.deltas import assemble
from metal_engine.answers.format_phases import call_phase
from metal_engine.answers.tool_plan import ToolPlan
from metal_engine.checkpoints.answer_formats import CALL_SYNTAXES, find_answer_format
from tests.support.call_walks import called, vocabulary
from tests.support.golden import GOLDEN_TOOLS, GoldenCase, golden_cases
from tests.support.splitting import cuts
from tools.fixtures.fake_engine import tiny_tokenizer

CASES = golden_cases()
# Parsers of formats whose marks may be dropped.
_MANY_MARKS = ("kimi_k3", "auto")
PLAN = ToolPlan(shown=GOLDEN_TOOLS, parsed=GOLDEN_TOOLS)


def answers(case: GoldenCase) -> ChatAnswers:
    known = find_answer_format(tiny_tokenizer().hf_tokenizer, case.parser, case.reasoning_parser)
    prompt_end = "assistant\n"
    if known.reasoning is not None and case.options & {"begun", "past"}:
        prompt_end += f"{known.reasoning.start}\n"
        prompt_end += f"\n{known.reasoning.end}\n\n" if "past" in case.options else ""
    return ChatAnswers.for_prompt(known, PLAN, [], lambda ids: prompt_end)


def read(chat: ChatAnswers, parts: Iterable[str], reason: str, *, incremental: bool = False) -> tuple:
    """Return the content, the reasoning, the calls and their ids."""
    reader = chat.reader(incremental=incremental)
    answer = assemble([delta for part in parts for delta in reader.add(part, ())] + reader.add("", (), reason))
    assert reader.num_calls == len(answer.tool_calls)
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    ids = [call.id for call in answer.tool_calls]
    assert len(set(ids)) == len(ids)
    return answer.content, answer.reasoning, calls, ids


def test_every_format_has_cases() -> None:
    assert {case.parser for case in CASES} == {*CALL_SYNTAXES, "auto"}
    assert len({str(case) for case in CASES}) == len(CASES)


EVERY = [7, pytest.param(1, marks=pytest.mark.full)]  # distance of the cuts between two pieces


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_answers(case: GoldenCase, every: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    chat = answers(case)
    reasons = {"length" if "cut" in case.options else "stop"}
    if not case.calls and case.reasoning is None:
        reasons.add("length")
    # A stream contains the beginning of a malformed call.
    streams = [False, True] if case.calls and "cut" not in case.options else [False]
    for parts, incremental, reason in product(cuts(case.text, every), streams, reasons):
        content, reasoning, calls, ids = read(chat, parts, reason, incremental=incremental)
        assert (content, reasoning, calls) == (case.content, case.reasoning, case.calls), parts
        assert all(ids[at] == given for at, given in case.ids.items())


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("case", [case for case in CASES if case.calls], ids=str)
def test_golden_answers_that_are_cut_off(case: GoldenCase, every: int, caplog: pytest.LogCaptureFixture) -> None:
    """No call is invented. Text without a call is not lost."""
    caplog.set_level(logging.CRITICAL)
    chat = answers(case)
    for end in range(1, len(case.text), every):
        text = case.text[:end]
        content, reasoning, calls, _ = read(chat, [text], "length")
        assert calls == case.calls[: len(calls)]
        if not calls and case.reasoning is None and "begun" not in case.options and case.parser not in _MANY_MARKS:
            assert (content, reasoning) == (text, None)


@pytest.mark.parametrize("kind", ["plain", "special"])
@pytest.mark.parametrize("case", [case for case in CASES if case.calls and "free" not in case.options], ids=str)
def test_grammars_allow_golden_calls(case: GoldenCase, kind: str) -> None:
    known = answers(case).format
    phase = call_phase(known, GOLDEN_TOOLS, parallel=True)
    assert phase is not None
    text = case.text
    if case.reasoning is not None and known.reasoning is not None and not known.harmony:
        text = text.partition(known.reasoning.end)[2]
    assert called(vocabulary(kind), phase.triggers, text) > 0
