"""Tools described in a message: their descriptions, and calls and results as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.deltas import assemble
from metal_engine.answers.tool_plan import ToolPlan, plan_tools
from metal_engine.answers.tool_prompts import JSON_CALLS, prompted_format, with_instructions, written_calls
from tests.support.splitting import THINK, answer_format
from tests.support.tool_formats import TOOLS, TRAINS, WEATHER

BOTH = f"Well.\n<tool_call>\n{json.dumps({'name': WEATHER[0], 'arguments': WEATHER[1]})}\n</tool_call>"
BOTH += f"\n<tool_call>\n{json.dumps({'name': TRAINS[0], 'arguments': TRAINS[1]})}\n</tool_call>"


def told(known: AnswerFormat = AnswerFormat(), **more: Any) -> ToolPlan:  # noqa: B008
    return plan_tools(TOOLS, "auto", known, template_takes_tools=False, auto_tool_choice=True, **more)


def read(text: str, plan: ToolPlan, known: AnswerFormat = AnswerFormat()) -> tuple[str | None, list[tuple[str, Any]]]:  # noqa: B008
    answers = ChatAnswers.for_prompt(known, plan, [], lambda ids: "")
    results = []
    for pieces in ([text], list(text)):
        reader = answers.reader(incremental=len(pieces) > 1)
        answer = assemble([delta for piece in pieces for delta in reader.add(piece, ())] + reader.add("", (), "stop"))
        results.append((answer.content, [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]))
    assert results[0] == results[1]
    return results[0]


def test_calls_are_found() -> None:
    assert read(BOTH, told()) == ("Well.", [WEATHER, TRAINS])
    assert read("Just text.", told()) == ("Just text.", [])
    assert read(BOTH, told(parallel=False)) == ("Well.", [WEATHER])
    assert read(f"<think>hm</think>{BOTH}", told(), AnswerFormat(reasoning=THINK)) == ("Well.", [WEATHER, TRAINS])


@pytest.mark.parametrize("written", [
    [{"name": "find_trains", "arguments": {"city": "Rome"}}],
    {"name": "find_trains", "parameters": {"city": "Rome"}},
    {"arguments": '{"city": "Rome"}', "name": "find_trains"},
], ids=["a list", "parameters", "quoted"])  # fmt: skip
def test_calls_in_common_wrong_json_forms_are_parsed(written: Any) -> None:
    assert read(f"<tool_call>{json.dumps(written)}</tool_call>", told()) == (None, [TRAINS])


@pytest.mark.parametrize(("content", "expected"), [
    ("Be kind.", "Be kind.\n\nTools."),
    ("", "Tools."),
    ([{"type": "text", "text": "Be kind."}], [{"type": "text", "text": t} for t in ("Be kind.", "\n\nTools.")]),
])  # fmt: skip
def test_there_is_one_system_message(content: Any, expected: Any) -> None:
    """Some templates refuse two system messages. The caller's messages do not change."""
    user = {"role": "user", "content": "Hi."}
    messages = [{"role": "system", "content": content, "name": "s"}, user]
    assert with_instructions(messages, "Tools.") == [{"role": "system", "content": expected, "name": "s"}, user]
    assert messages[0]["content"] == content
    assert with_instructions([user], "Tools.") == [{"role": "system", "content": "Tools."}, user]


def test_native_call_format_takes_precedence_in_tool_instructions() -> None:
    known = answer_format("mistral")
    text = told(known).instructions
    assert text is not None and "[TOOL_CALLS]" in text and "<tool_call>" not in text
    assert prompted_format(known) is known
    assert read('[TOOL_CALLS]find_trains[ARGS]{"city": "Rome"}', told(known), known) == (None, [TRAINS])


def test_calls_written_to_the_prompt_parse_to_the_same_calls() -> None:
    calls = [(name, json.dumps(arguments)) for name, arguments in (WEATHER, TRAINS)]
    assert written_calls("Well.", calls, None) == BOTH
    assert read(written_calls("", calls, JSON_CALLS), told()) == (None, [WEATHER, TRAINS])
