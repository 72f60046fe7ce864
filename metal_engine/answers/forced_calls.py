"""Answers that are tool calls by a JSON schema: the schema, and its texts into pieces."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from metal_engine.answers.json_reader import JSONObjectReader
from metal_engine.answers.pieces import CallArguments, CallStart, Piece, TextPiece, new_call_id
from metal_engine.errors import ParameterError

logger = logging.getLogger(__name__)

Schema = dict[str, Any]

# Of the list of calls, what comes before a call's parameters.
_CALL = re.compile(
    r"""\s*(?:\[|\}\s*,)\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)""", re.DOTALL
)
# Keywords whose values are no schemas, so what looks like a reference in them is none.
_DATA = frozenset({"const", "enum", "default", "examples"})
# Keywords whose values have schemas by name; the names are no keywords, whatever they look like.
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def forced_schema(tools: list[dict[str, Any]], name: str | None, *, parallel: bool) -> Schema:
    """The JSON schema of an answer that is calls of ``tools`` (in OpenAI's form); of one call's arguments if ``name``
    names it, else of a list of objects with ``name`` and ``parameters``. What :class:`ForcedCallSplitter` reads.

    Raises:
        ParameterError: parameters that are not those of an object.
    """
    try:
        return _forced_schema(tools, name, parallel)
    except RecursionError as error:
        raise ParameterError("tools", "have a schema that is nested too deeply") from error


def _forced_schema(tools: list[dict[str, Any]], name: str | None, parallel: bool) -> Schema:
    schemas = {tool["function"]["name"]: _parameters(i, tool) for i, tool in enumerate(tools)}
    if name is not None:
        return schemas[name]
    # Each tool's schema moves to a place of its own, with all that is in it: two may define the same name.
    definitions: Schema = {}
    calls = []
    for i, (tool_name, schema) in enumerate(schemas.items()):
        definitions[str(i)] = _moved(schema, f"#/$defs/{i}")
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


def _parameters(i: int, tool: dict[str, Any]) -> Schema:
    """The schema of a tool's arguments: of an object, whether it says so or not."""
    schema: Schema = tool["function"].get("parameters") or {}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ParameterError(f"tools[{i}].function.parameters", "must be the schema of an object")
    return {**schema, "type": "object"}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references within itself hold when it is found at ``root``."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: Schema = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in _DATA:
            moved[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(inner, root) for name, inner in value.items()}
        else:
            moved[key] = _moved(value, root)
    return moved


class ForcedCallSplitter:
    """The whole text is the arguments of one call, or, without ``name``, a list of calls: both by
    :func:`forced_schema`. Arguments are given out as they come; those of a text that was cut off are incomplete."""

    in_reasoning = False

    def __init__(self, name: str | None, *, parallel: bool = True) -> None:
        self.num_calls = 0
        self._name = name
        self._parallel = parallel
        self._text = ""
        self._reader: JSONObjectReader | None = None  # of the parameters under way

    def add(self, text: str) -> list[Piece]:
        if self._name is not None:
            pieces = [] if self.num_calls else [self._start(self._name)]
            return [*pieces, CallArguments(0, text)] if text else pieces
        self._text += text
        pieces = []
        while self._text and (self._parallel or self.num_calls < 2):
            if self._reader is None:
                found = _CALL.match(self._text)
                if found is None:
                    break
                self._text = self._text[found.end() :]
                self._reader = JSONObjectReader()
                pieces.append(self._start(json.loads(found[1])))
            taken = self._reader.add(self._text)
            if taken:
                pieces.append(CallArguments(self.num_calls - 1, self._text[:taken]))
                self._text = self._text[taken:]
            if self._reader.done:
                self._reader = None
            if self._reader is not None:
                break
        return pieces if self._parallel else [piece for piece in pieces if _index(piece) == 0]

    def finish(self, *, truncated: bool) -> list[Piece]:
        if self._name is not None or self.num_calls or not self._text:
            return []
        logger.warning("malformed tool calls are given as text: %.200r", self._text)
        return [TextPiece("content", self._text)]

    def _start(self, name: str) -> Piece:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, new_call_id(), name)


def _index(piece: Piece) -> int:
    assert not isinstance(piece, TextPiece)
    return piece.index
