"""Phases of an answer in a model's own format: its reasoning, and the grammars of its tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.tool_parsers.json_calls import JSON_CALLS
from metal_engine.output_phases import CallPhase, CallTrigger, ReasoningPhase


def call_phase(answer_format: AnswerFormat, tools: Sequence[dict[str, Any]], *, parallel: bool) -> CallPhase | None:
    """Return the grammar of calls that a model may begin; None if no grammar is known for the format.

    Args:
        answer_format: output format of the model.
        tools: tools that may be called, in OpenAI's form.
        parallel: True if several calls are allowed.
    """
    if answer_format.tool is not JSON_CALLS:
        return None
    calls = []
    for tool in tools:
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or {})}
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        calls.append(f"{head} %json {json.dumps(schema)}")
    rules = " | ".join(calls)
    grammar = f'call: ws one ws "}}" ws @"</tool_call>"\none: {rules}\nws: /[ \\n]*/\n'
    return CallPhase((CallTrigger(JSON_CALLS.tool_call_start, grammar),), parallel=parallel)


def reasoning_phase(
    answer_format: AnswerFormat, *, begins_inside: bool, is_structured: bool, budget: int | None
) -> ReasoningPhase | None:
    """Return the reasoning of a model; None if the model does not reason.

    Args:
        answer_format: output format of the model.
        begins_inside: True if the prompt ends within reasoning.
        is_structured: True if a structured output follows the reasoning.
        budget: maximum number of tokens of the reasoning; None: no limit.
    """
    marks = answer_format.reasoning
    if marks is None:
        return None
    return ReasoningPhase(marks.start, marks.end, begins_inside=begins_inside, budget=budget)
