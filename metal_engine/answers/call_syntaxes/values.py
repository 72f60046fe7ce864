"""Grammars and a reader for arguments in formats that write strings as raw text, and other values as JSON."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from metal_engine.answers.call_syntaxes.lark import (
    GAP,
    GrammarRules,
    NotExpressibleError,
    TextNotExpressibleError,
    containing,
    escaped,
    json_value,
    mark,
    string,
)
from metal_engine.answers.call_syntaxes.strings import is_limited, text_terminal
from metal_engine.answers.call_syntaxes.tool_schemas import KINDS, ToolSchema, kind_of
from metal_engine.answers.deltas import json_text

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_SPACE = " \t\r\n"
_SPACES = re.compile(rf"[{_SPACE}]*")
_JSON_LITERALS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
PYTHON_LITERALS: dict[str, bool | None] = {"True": True, "False": False, "None": None}
_COMPOUND = {"{": "object", "[": "array"}
_COMPOUND_TEXT = r"/[ \t\r\n]*[\[{](?s:.*)/"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)


def python_literals(tool: ToolSchema, schema: Any) -> list[str]:
    """Return Lark strings for those of ``True``, ``False`` and ``None`` that a schema certainly allows."""
    return [string(text) for text, value in PYTHON_LITERALS.items() if tool.allows(schema, value)]


def json_of(tool: ToolSchema, schema: Any, kinds: frozenset[str]) -> str:
    """Return a Lark expression for the JSON values that a schema allows and whose types are in ``kinds``."""
    alone = tool.alone(schema)
    if tool.kinds(schema) - kinds:
        definitions = {"$defs": alone.pop("$defs")} if isinstance(alone, dict) and "$defs" in alone else {}
        alone = {"allOf": [alone, {"type": sorted(kinds)}], **definitions}
    return json_value(alone, strict=tool.is_strict)


def after_space(text: str, at: int) -> int:
    """Return the position of the first character at or after ``at`` that is not white space."""
    found = _SPACES.match(text, at)
    assert found is not None
    return found.end()


def not_expressible(kinds: frozenset[str], *marks: str) -> NotExpressibleError:
    """Return the error to raise if a format cannot express any value that a schema allows.

    Args:
        kinds: JSON types that the schema allows.
        marks: texts that strings cannot contain.
    """
    return TextNotExpressibleError(*marks) if "string" in kinds else NotExpressibleError()


class RawValues:
    """Builds grammars for, and reads, the values of arguments in a format with tags.

    If the schema of an argument allows objects or arrays as well as strings, the grammar excludes strings that begin
    with ``{`` or ``[``. The reader would take them for JSON.

    Args:
        end: text that ends a value.
        without: texts that a string cannot contain.
        hidden: prefix of encoded strings, such as ``<![CDATA[``; empty if the format has none. If a schema limits the
            strings, the grammar excludes strings with this prefix.
        pad: text that may precede and follow each value, such as a line break.
        python: True if values may also be Python's ``True``, ``False`` and ``None``.
        untyped: JSON types to use for a value whose schema does not limit the type.
    """

    def __init__(
        self,
        end: str,
        without: tuple[str, ...] = (),
        *,
        hidden: str = "",
        pad: str = "",
        python: bool = False,
        untyped: frozenset[str] = KINDS,
    ) -> None:
        self._end = end
        self._without = without
        self._hidden = hidden
        self._pad = pad
        self._literals = {**_JSON_LITERALS, **(PYTHON_LITERALS if python else {})}
        self._python = python
        self._untyped = untyped

    def grammar(self, rules: GrammarRules, tool: ToolSchema, schema: Any) -> str:
        """Return the name of a rule for a value that a schema allows, including the text that ends the value.

        Raises:
            NotExpressibleError: the format cannot express any value that the schema allows.
        """
        kinds = self._kinds(tool, schema)
        others = kinds - {"string"}
        options: list[str] = []
        compound = others & {"object", "array"}
        if "string" in kinds:
            limited = is_limited(tool, schema)
            without = [containing(text) for text in self._without]
            without += [f"/{escaped(self._hidden)}(?s:.*)/"] if self._hidden and limited else []
            without += [_COMPOUND_TEXT] if compound else []
            terminal = text_terminal(rules, tool, schema, end=self._end, without=without)
            pad = self._pad if limited else ""
            if terminal is not None:
                options.append(f"{string(pad)} " * bool(pad) + rules.text_until(terminal, pad + self._end))
                # Any text includes the scalars: the reader returns a text as a scalar if the schema allows it.
                others = others if limited else compound
        gap = GAP if self._pad else ""
        if others:
            options.append(f"{gap} {json_of(tool, schema, others)} {gap} {mark(self._end)}")
        if others and self._python:
            options += [f"{gap} {literal} {gap} {mark(self._end)}" for literal in python_literals(tool, schema)]
        if not options:
            raise not_expressible(kinds, self._end, *self._without)
        return rules.rule(" | ".join(options))

    def read(self, text: str, start: int, tool: ToolSchema, schema: Any) -> tuple[str, int] | None:
        """Return the value at a position, as JSON text, and the position after its end.

        Return None if the value has no end, contains one of ``without``, or has a type that does not fit the schema.
        """
        kinds = self._kinds(tool, schema)
        at = after_space(text, start)
        if _COMPOUND.get(text[at : at + 1]) in kinds:
            with suppress(ValueError):
                end = DECODER.raw_decode(text, at)[1]
                after = after_space(text, end)
                if text.startswith(self._end, after):
                    return text[at:end], after + len(self._end)
        end = text.find(self._end, start)
        raw = text[start:end]
        if end < 0 or any(one in raw for one in self._without):
            return None
        value = self._scalar(raw, kinds, tool, schema)
        return None if value is None else (value, end + len(self._end))

    def _scalar(self, text: str, kinds: frozenset[str], tool: ToolSchema, schema: Any) -> str | None:
        """Return the JSON text of the string, number, boolean or null that ``text`` spells; None if no type fits."""
        if self._pad:
            text = text.removeprefix(self._pad).removesuffix(self._pad)
        stripped = text.strip(_SPACE)
        is_number = _NUMBER.fullmatch(stripped) is not None
        if kinds != {"string"} and (is_number or stripped in self._literals):
            value = json.loads(stripped) if is_number else self._literals[stripped]
            if kind_of(value) in kinds and ("string" not in kinds or tool.allows(schema, value)):
                return stripped if is_number else json.dumps(value)
        return json_text(text) if "string" in kinds else None

    def _kinds(self, tool: ToolSchema, schema: Any) -> frozenset[str]:
        kinds = tool.kinds(schema)
        return self._untyped if kinds == KINDS else kinds
