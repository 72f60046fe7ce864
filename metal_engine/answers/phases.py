"""Phases of an answer in a model's own format: its reasoning, and the grammars of its tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metal_engine.answers import harmony
from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.call_syntaxes.syntax import NotExpressibleError
from metal_engine.answers.call_syntaxes.tool_schemas import tool_schemas
from metal_engine.errors import ParameterError
from metal_engine.output_phases import CallPhase, ReasoningPhase


def call_phase(answer_format: AnswerFormat, tools: Sequence[dict[str, Any]], *, parallel: bool) -> CallPhase | None:
    """Return the grammars of the calls that a model may begin.

    Return None if the grammar of the format is unknown, or if the format cannot express a tool's name or one of its
    required arguments.

    Args:
        answer_format: output format of the model.
        tools: tools that may be called, in OpenAI's form.
        parallel: True if several calls are allowed.

    Raises:
        ParameterError: a tool's parameters are not the schema of an object.
    """
    syntax = answer_format.syntax
    if syntax is None or not tools:
        return None
    try:
        triggers = syntax.triggers(tool_schemas(tools), parallel=parallel)
    except NotExpressibleError:
        return None
    except RecursionError as error:
        raise ParameterError("tools", "have a schema that is nested too deeply") from error
    return CallPhase(triggers, parallel=parallel)


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
    if answer_format.harmony and is_structured:
        # The structured output is the message of the final channel, whether or not the model reasons before it.
        return ReasoningPhase(marks.start, harmony.FINAL, True, budget, harmony.TO_NEXT_MESSAGE)
    return ReasoningPhase(marks.start, marks.end, begins_inside, budget)
