"""Tools for models whose chat template takes none: what a message tells of them, and how calls are then written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat, ToolParser
from metal_engine.answers.tool_parsers.json_calls import JSON_CALL_HEAD, JSON_CALLS

Tool = dict[str, Any]


def prompted_format(answer_format: AnswerFormat) -> AnswerFormat:
    """The format of a model's answers once it has been told of tools: its own calls', if it has any."""
    if answer_format.tool is not None:
        return answer_format
    return replace(answer_format, tool=JSON_CALLS, call_head=JSON_CALL_HEAD)


def instructions(tools: Sequence[Tool], parser: ToolParser | None) -> str:
    """What the model is told of tools that it may call.

    Args:
        parser: parser of the model's own format of calls; None for ``JSON_CALLS``.
    """
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    listed = f"You may call functions to help the user. They are, as JSON:\n<tools>\n{functions}\n</tools>\n\n"
    if parser is not None:
        return f"{listed}Write calls in your own format for them, beginning with {parser.tool_call_start}"
    start, end = JSON_CALLS.tool_call_start, JSON_CALLS.tool_call_end
    form = '{"name": <function\'s name>, "arguments": <JSON object>}'
    how = f"To call a function, write a JSON object between these marks:\n{start}\n{form}\n{end}\n"
    return f"{listed}{how}Its result follows. Where no function is needed, just answer."


def with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a conversation whose system message ends with a text. Adds a system message if none is first."""
    own, others = "", messages
    if messages and messages[0].get("role") == "system" and isinstance(messages[0].get("content"), str):
        own, others = messages[0]["content"], messages[1:]
    return [{"role": "system", "content": f"{own}\n\n{text}".lstrip()}, *others]


def forced_instructions(tools: Sequence[Tool], name: str | None) -> str:
    """What the model is told of tools that it must call: those of a list of calls, or the one of that name."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if name is not None:
        return f"Answer with the parameters of a call of the function {name}, as JSON. Functions: {functions}"
    return f"Answer with a JSON list of function calls, each with name and parameters. Functions: {functions}"


def written_calls(content: str, calls: Iterable[tuple[str, str]], parser: ToolParser | None) -> str:
    """A turn of the assistant that has calls, as it would have written it.

    Args:
        content: what it said before them.
        calls: name and arguments of each, the arguments as JSON.
        parser: as for :func:`instructions`.
    """
    start, end = (parser or JSON_CALLS).tool_call_start, (parser or JSON_CALLS).tool_call_end
    written = [
        f'{start}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{end}'
        for name, arguments in calls
    ]
    return "\n".join([content, *written] if content else written)


def written_result(content: str) -> str:
    """The result of a call as a message of the user's can have it."""
    return f"<tool_response>\n{content}\n</tool_response>"
