"""DeepSeek's tool calls: JSON arguments between special tokens, or an element for each argument.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜DSML｜function_calls><｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
</｜DSML｜invoke></｜DSML｜function_calls>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from metal_engine.answers.tool_parsers.json_calls import JSON_CALLS

_DECODER = json.JSONDecoder()
# Start of a call up to its arguments. V3 and R1 write ``function`` before the name, and a code block.
_HEAD = re.compile(
    r"\s*+<｜tool▁call▁begin｜>\s*+(?:function\s*+<｜tool▁sep｜>)?\s*+(?P<name>[^\s<>`{]{1,256})\s*+(?:<｜tool▁sep｜>)?\s*+"
    r"(?:```(?:json)?\s*+)?"
)
# The last call may lack its closing mark.
_TAIL = re.compile(r"\s*+(?:```)?\s*+(?:<｜tool▁call▁end｜>\s*+|\Z)")

_NAME = r'\s+name\s*=\s*"(?P<name>[^"<>]{1,256})"'
_INVOKE = re.compile(rf"\s*<｜DSML｜invoke{_NAME}\s*>\s*")
_INVOKE_END = re.compile(r"\s*</｜DSML｜invoke>\s*")
_PARAMETER = re.compile(
    rf'<｜DSML｜parameter{_NAME}(?:\s+string\s*=\s*"(?P<string>true|false)")?\s*>'
    r"(?P<value>[^<]*+(?:<(?!/?｜DSML｜)[^<]*+)*+)</｜DSML｜parameter>\s*"
)


class DeepSeekCalls:
    """Parser of calls in the form of DeepSeek V3, R1 and V3.1: JSON arguments between special tokens."""

    tool_call_start = "<｜tool▁calls▁begin｜>"
    tool_call_end = "<｜tool▁calls▁end｜>"

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> list[dict[str, Any]]:
        """Return the calls in a text. Raises an exception of any type if the text does not consist of calls only."""
        if text.lstrip().startswith(("{", "[")):
            return JSON_CALLS.parse_tool_call(text)
        return _calls(text, _HEAD, _DECODER.raw_decode, _TAIL)


class DSMLCalls:
    """Parser of calls as tags, in the form of V3.2 and V4.

    Args:
        block: name of the tag around all calls.
    """

    def __init__(self, block: str) -> None:
        self.tool_call_start = f"<｜DSML｜{block}>"
        self.tool_call_end = f"</｜DSML｜{block}>"

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> list[dict[str, Any]]:
        """Return the calls in a text. Raises an exception of any type if the text does not consist of calls only.

        The arguments of a call may also be one JSON object in place of tags, and all calls may be JSON objects.
        """
        if text.lstrip().startswith(("{", "[")):
            return JSON_CALLS.parse_tool_call(text)
        return _calls(text, _INVOKE, _parameters, _INVOKE_END)


def _calls(
    text: str,
    head: re.Pattern[str],
    arguments_at: Callable[[str, int], tuple[dict[str, Any], int]],
    tail: re.Pattern[str],
) -> list[dict[str, Any]]:
    """Return the calls in a text.

    Args:
        text: text that consists of calls.
        head: pattern for the start of a call, with the group ``name``.
        arguments_at: takes a text and a position. Returns the arguments at the position, and the position after them.
        tail: pattern for the end of a call.

    Raises:
        ValueError: the text does not consist of calls only, or the arguments are invalid.
    """
    calls: list[dict[str, Any]] = []
    at = 0
    while at < len(text):
        begin = head.match(text, at)
        if begin is None:
            raise ValueError("the text has parts outside of calls")
        arguments, at = arguments_at(text, begin.end())
        end = tail.match(text, at)
        if end is None:
            raise ValueError("the arguments are not followed by the end of the call")
        calls.append({"name": begin["name"], "arguments": arguments})
        at = end.end()
    return calls


def _parameters(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return the arguments at a position, as one JSON object or as tags, and the position after the arguments.

    Raises:
        ValueError: the JSON object is invalid, or an argument occurs twice.
    """
    if text.startswith("{", at):
        return _DECODER.raw_decode(text, at)
    arguments: dict[str, Any] = {}
    while (found := _PARAMETER.match(text, at)) is not None:
        if found["name"] in arguments:
            raise ValueError("an argument occurs twice")
        value: Any = found["value"]
        if found["string"] == "false":
            with suppress(ValueError):
                value = json.loads(value)
        arguments[found["name"]] = value
        at = found.end()
    return arguments, at
