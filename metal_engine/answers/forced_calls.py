"""Forced tool calls: builds the JSON schema that forces an output to be tool calls, and parses such an output."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from metal_engine.answers.deltas import AnswerDelta, ArgumentsDelta, CallStart, TextDelta, new_call_id
from metal_engine.answers.json_reader import JSONObjectReader
from metal_engine.answers.splitter import Splitter
from metal_engine.errors import ParameterError
from metal_engine.json_schemas.closed import closed
from metal_engine.json_schemas.document import LIMITING, OPAQUE

logger = logging.getLogger(__name__)

Schema = dict[str, Any]

# Start of a call in the list of calls, up to the call's parameters.
_CALL = re.compile(
    r"""\s*(?:\[|\}\s*,)\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)""", re.DOTALL
)
# Keywords whose values are data, not schemas. A ``$ref`` inside them is not a reference.
_DATA = frozenset({"const", "enum", "default", "examples"})
# Keywords whose values map names to schemas; a name may look like a keyword.
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def forced_schema(tools: list[dict[str, Any]], name: str | None, *, parallel: bool) -> Schema:
    """Return the JSON schema of an output that consists of tool calls. :class:`ForcedCallSplitter` parses the output.

    Args:
        tools: tools that may be called, in OpenAI's form.
        name: name of the tool to call. The output is then only the tool's arguments. If None, the output is a list of
            calls, e.g. ``[{"name": "get_weather", "parameters": {"city": "Rome"}}]``.
        parallel: True if the list may have several calls.

    Raises:
        ParameterError: a tool's parameters are not the schema of an object, are nested too deeply, or cannot be closed
            or opened (see :func:`tool_parameters`).
    """
    schemas = {tool["function"]["name"]: tool_parameters(i, tool) for i, tool in enumerate(tools)}
    if name is not None:
        return schemas[name]
    # Each tool's schema, with its definitions, moves to a separate place, because two tools may define the same name.
    definitions: Schema = {}
    calls = []
    for i, (tool_name, schema) in enumerate(schemas.items()):
        try:
            definitions[str(i)] = moved(schema, partial(_within, f"#/$defs/{i}"))
        except RecursionError as error:
            raise ParameterError("tools", "have a schema that is nested too deeply") from error
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool_name}, "parameters": {"$ref": f"#/$defs/{i}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    listed: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return listed if parallel else {**listed, "maxItems": 1}


def tool_parameters(i: int, tool: dict[str, Any]) -> Schema:
    """Return the schema of a tool's arguments.

    The type of the result is "object", even if the tool declares no type or a list of types.

    The schema of a tool without parameters allows no arguments. The tool's ``strict`` decides about unlisted properties
    of the objects in the schema:

    - true: forbidden, by :func:`metal_engine.json_schemas.closed.closed`.
    - false: allowed explicitly, by ``additionalProperties: true``.
    - missing: not changed here. The callers apply ``closed``, as to all other schemas.

    Args:
        i: index of the tool in the request, for messages.
        tool: tool in OpenAI's form.

    Raises:
        ParameterError: the parameters are not the schema of an object, or cannot be closed or opened.
    """
    schema: Schema | None = tool["function"].get("parameters")
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ParameterError(f"tools[{i}].function.parameters", "must be the schema of an object")
    schema = {**schema, "type": "object"}
    strict = tool["function"].get("strict")
    if strict is None:
        return schema  # grammar_source() closes it like all other schemas
    try:
        return closed(schema, strict=True) if strict else _opened(schema)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"tools[{i}].function.parameters", str(error)) from error


def _opened(schema: Any) -> Any:
    """Return a copy of a schema with ``additionalProperties: true`` in objects that do not limit their properties."""
    if isinstance(schema, list):
        return [_opened(item) for item in schema]
    if not isinstance(schema, dict) or not OPAQUE.isdisjoint(schema):  # opaque schemas are never closed
        return schema
    copy: Schema = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            copy[key] = {name: _opened(inner) for name, inner in value.items()}
        else:
            copy[key] = value if key in _DATA else _opened(value)
    if "properties" in schema and LIMITING.isdisjoint(schema):
        copy["additionalProperties"] = True
    return copy


def _within(root: str, reference: str) -> str:
    """Return a reference into a schema that has moved to ``root``: ``#/$defs/0/a`` for ``#/$defs/0`` and ``#/a``."""
    return root + reference[1:]


def moved(schema: Any, target: Callable[[str], str]) -> Any:
    """Return a copy of a schema with new ``$ref`` values. References to other documents stay unchanged.

    Args:
        schema: JSON schema or a part of a JSON schema.
        target: takes a reference that begins with ``#``. Returns the new reference.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    if isinstance(schema, list):
        return [moved(item, target) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy: Schema = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            copy[key] = target(value)
        elif key in _DATA:
            copy[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            copy[key] = {name: moved(inner, target) for name, inner in value.items()}
        else:
            copy[key] = moved(value, target)
    return copy


class ForcedCallSplitter(Splitter):
    """Splits an output that a grammar has forced to match the result of :func:`forced_schema`.

    Arguments are streamed. If the text was cut off, the arguments are incomplete.

    Args:
        name: name of the tool to call, if the output consists of its arguments; None if the output is a list of calls.
        parallel: True if several calls are allowed. Otherwise, calls after the first one are dropped.
    """

    num_calls: int = 0

    def __init__(self, name: str | None, *, parallel: bool = True) -> None:
        self._name = name
        self._parallel = parallel
        self._text = ""
        self._reader: JSONObjectReader | None = None  # reader of the current call's parameters

    def add(self, text: str) -> list[AnswerDelta]:
        if self._name is not None:
            begun: list[AnswerDelta] = [] if self.num_calls else [self._start(self._name)]
            return [*begun, ArgumentsDelta(0, text)] if text else begun
        self._text += text
        deltas: list[CallStart | ArgumentsDelta] = []
        while self._text and (self._parallel or self.num_calls < 2):
            if self._reader is None:
                found = _CALL.match(self._text)
                if found is None:
                    break
                self._text = self._text[found.end() :]
                self._reader = JSONObjectReader()
                deltas.append(self._start(json.loads(found[1])))
            taken = self._reader.add(self._text)
            if taken:
                deltas.append(ArgumentsDelta(self.num_calls - 1, self._text[:taken]))
                self._text = self._text[taken:]
            if not self._reader.done:
                break
            self._reader = None
        return [delta for delta in deltas if self._parallel or delta.index == 0]

    def finish(self, *, truncated: bool) -> list[AnswerDelta]:
        if self._name is not None or self.num_calls or not self._text:
            return []
        logger.warning("malformed tool calls are returned as text: %.200r", self._text)
        return [TextDelta("content", self._text)]

    def _start(self, name: str) -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, new_call_id(), name)
