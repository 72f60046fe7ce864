"""Qwen3-Coder's tool calls: functions and parameters as tags.

<function=NAME>
<parameter=city>
Rome
</parameter>
</function>
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from typing import Any

_FUNCTION = re.compile(r"<function=\s*([^\s<>]+)\s*>")
_PARAMETER = re.compile(r"<parameter=\s*([^\s<>]+)\s*>")
_STRAY = re.compile(r"(?:\s|</?tool_call>|</parameter>|</function>)*+")
_SPACE = re.compile(r"(?:\s|</parameter>)*+")
_OPENING, _CLOSING, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
# End of a value whose closing tag is missing.
_UNCLOSED_END = re.compile(r"(?=<parameter=\s*[^\s<>]+\s*>|</function>|\Z)")
_TWO_CLOSINGS = re.compile(r"</parameter>\s*</parameter>")
_PAIRS = ((_OPENING, _CLOSING), ("<function=", _FUNCTION_END))
# Text that must follow ``</function>``. Otherwise, the tag does not end a function and is part of a value.
_AFTER_FUNCTION = r"\s*(?:<function=|</?tool_call>|\Z)"

# Maps Python's type names, which some clients send, to the names of JSON Schema.
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean",
    "dict": "object", "list": "array",
}  # fmt: skip


class Qwen3CoderCalls:
    """Parser of the ``<function=NAME>`` elements in a text. Text outside of the elements is content.

    If the model left out the closing tag of a parameter, the value ends at the next tag of the call or at the end of
    the text.
    """

    tool_call_start = "<tool_call>"
    tool_call_end = "</tool_call>"

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> list[dict[str, Any] | str]:
        """Return the calls in a text, and the texts outside of calls, in their order.

        Raises:
            ValueError: a call cannot be parsed.
        """
        properties = {tool["function"]["name"]: _properties(tool) for tool in tools or ()}
        items: list[dict[str, Any] | str] = []
        at = _end_of(_STRAY, text, 0)
        while (found := _FUNCTION.search(text, at)) is not None:
            items.append(text[at : found.start()])
            arguments, at = _arguments(text, found.end(), properties.get(found[1], {}))
            items.append({"name": found[1], "arguments": arguments})
            stray = text[at : _end_of(_STRAY, text, at)]
            at += len(stray.rstrip())  # the white space before the next text separates it from earlier content
        return [*items, text[at:]]


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match at a position. The pattern must match everywhere, at least the empty text."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def _properties(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of a tool's parameters, by their names."""
    properties = (tool["function"].get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _arguments(text: str, at: int, properties: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the arguments of a function whose opening tag ends at ``at``, and the position after the function.

    Raises:
        ValueError: the arguments are invalid, or the end of a value is ambiguous.
    """
    ends = _value_end(properties)
    arguments: dict[str, Any] = {}
    end = -1  # regular end of the current value; greater than the text's length if there is none
    num_open = 0  # number of opening tags of parameters before ``end``, less the closing tags
    while True:
        at = _end_of(_SPACE, text, at)
        if text.startswith(_FUNCTION_END, at):
            return arguments, at + len(_FUNCTION_END)
        if at == len(text) or text.startswith(("<function=", "<tool_call>"), at):
            return arguments, at
        found = _PARAMETER.match(text, at)
        if found is None or found[1] in arguments:
            raise ValueError("the call has text between parameters, or a parameter twice")
        start = found.end()
        if end < start:
            match = ends.search(text, start)
            end = len(text) + 1 if match is None else match.start()
            num_open = text.count(_OPENING, start, end) - text.count(_CLOSING, start, end)
        else:  # the previous value was unclosed and ended before this tag
            num_open -= 1
        if end <= len(text) and (num_open <= 0 or _TWO_CLOSINGS.match(text, end)):
            at = end
        else:
            at = _UNCLOSED_END.search(text, start).start()  # type: ignore[union-attr]  # matches the end of the text
            if not text[start:at].strip() and at == len(text):
                raise ValueError(f"the parameter {found[1][:100]} has no value")
        value = text[start:at]
        if any(value.count(opening) != value.count(closing) for opening, closing in _PAIRS):
            raise ValueError(f"the parameter {found[1][:100]} has several possible ends")
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[found[1]] = _typed(value, properties.get(found[1]))


def _value_end(properties: dict[str, Any]) -> re.Pattern[str]:
    """Return a pattern for the end of a value: the closing tag, or the next tag if the closing tag is missing.

    A value can contain tags, such as text about this format. Therefore a closing tag ends the value only before another
    tag of the call or at the end of the text. An opening tag ends the value only if it names a parameter of the tool.

    ``_arguments`` searches for ``_UNCLOSED_END`` instead if this pattern does not match, or if the value up to the
    match contains more opening tags of parameters than closing tags.
    """
    closing = rf"{_CLOSING}(?=\s*(?:{_OPENING}|{_CLOSING}|{_FUNCTION_END}|<function=|\Z))"
    names = "|".join(map(re.escape, properties))
    opening = rf"|{_OPENING}\s*(?:{names})\s*>" if names else ""
    return re.compile(rf"{closing}{opening}|{_FUNCTION_END}(?={_AFTER_FUNCTION})")


def _typed(text: str, schema: Any) -> Any:
    """Parse a value's text as JSON or as a Python literal of a type that the schema allows.

    Return the text unchanged if no type fits.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    if stripped.lower() in ("null", "none") and ("null" in kinds or "string" not in kinds):
        return None
    if stripped.lower() in ("true", "false") and "boolean" in kinds:
        return stripped.lower() == "true"
    for read in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings(action="ignore"):  # an unknown escape would be written to stderr
                value = read(stripped)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, float) and value.is_integer() and "integer" in kinds:
            value = int(value)
        if _is_of(value, kinds):
            return value
    return text


def _kinds(schema: Any) -> set[str]:
    """Return the JSON types that ``type``, ``anyOf`` and ``oneOf`` of a schema name.

    Return string, object and array if the schema names no type, and only string if there is no schema.
    """
    if not isinstance(schema, dict):
        return {"string"}
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {kind for kind in named or () if isinstance(kind, str)}
    for keyword in ("anyOf", "oneOf"):
        for option in schema.get(keyword) or ():
            kinds |= _kinds(option)
    return {_ALIASES.get(kind.lower(), kind.lower()) for kind in kinds} or {"string", "object", "array"}


def _is_of(value: Any, kinds: set[str]) -> bool:
    """Return True if a value other than a string has one of the JSON types."""
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return bool(kinds & {"integer", "number"})
    if isinstance(value, float):
        return "number" in kinds and math.isfinite(value)
    return (isinstance(value, dict) and "object" in kinds) or (isinstance(value, list) and "array" in kinds)
