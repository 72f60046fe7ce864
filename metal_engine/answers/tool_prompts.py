"""Describes tools to models whose chat template does not support them, and formats calls in messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat, ToolParser
from metal_engine.answers.call_syntaxes.json_formats import HERMES
from metal_engine.answers.tool_parsers.json_calls import JSON_CALL_HEAD, JSON_CALLS

Tool = dict[str, Any]


def prompted_format(answer_format: AnswerFormat) -> AnswerFormat:
    """Return the output format of a model whose tools are described by a system message.

    The result has the model's own call format, or the format of ``JSON_CALLS`` if the model's format is unknown.
    """
    if answer_format.tool is not None:
        return answer_format
    return replace(answer_format, tool=JSON_CALLS, call_head=JSON_CALL_HEAD, syntax=HERMES)


def instructions(tools: Sequence[Tool], parser: ToolParser | None) -> str:
    """Return the text that describes the tools that a model may call.

    Args:
        tools: tools in OpenAI's form.
        parser: parser of the model's own call format; None for ``JSON_CALLS``.
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
    """Return a copy of a conversation whose first message is a system message that ends with ``text``.

    Adds a system message if the first message is not a system message.
    """
    first = messages[0] if messages else {}
    own = first.get("content")
    if first.get("role") != "system" or not isinstance(own, str | list):
        return [{"role": "system", "content": text}, *messages]
    if isinstance(own, list):
        return [first | {"content": [*own, {"type": "text", "text": f"\n\n{text}"}]}, *messages[1:]]
    return [first | {"content": f"{own}\n\n{text}".lstrip()}, *messages[1:]]


def forced_instructions(tools: Sequence[Tool], name: str | None) -> str:
    """Return the text that describes the tools to a model if a grammar forces its calls.

    The text asks for the arguments of a call of ``name``. If ``name`` is None, the text asks for a list of calls.
    """
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if name is not None:
        return f"Answer with the parameters of a call of the function {name}, as JSON. Functions: {functions}"
    return f"Answer with a JSON list of function calls, each with name and parameters. Functions: {functions}"


def call_request(name: str | None) -> str:
    """Return the text that asks for a call of the tool ``name``, or of any tool if ``name`` is None."""
    return f"Answer with a call of the function {name}." if name is not None else "Answer with a function call."


def written_calls(content: str, calls: Iterable[tuple[str, str]], parser: ToolParser | None) -> str:
    """Return the text of an assistant message with tool calls: JSON objects between the marks of the call format.

    Args:
        content: text before the calls.
        calls: name and arguments of each call. The arguments are JSON.
        parser: parser of the model's own call format; None for ``JSON_CALLS``.
    """
    start, end = (parser or JSON_CALLS).tool_call_start, (parser or JSON_CALLS).tool_call_end
    written = [
        f'{start}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{end}'
        for name, arguments in calls
    ]
    return "\n".join([content, *written] if content else written)


def written_result(content: str) -> str:
    """Return the result of a call as text for a user message."""
    return f"<tool_response>\n{content}\n</tool_response>"
