"""Builds Lark terminals for strings in formats that write them as raw text up to a mark, without quotes or escapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from metal_engine.answers.call_syntaxes.lark import GrammarRules, containing, string
from metal_engine.answers.call_syntaxes.tool_schemas import ToolSchema
from metal_engine.json_schemas.document import listed

ANY_TEXT = "/(?s:.*)/"
# Constructs of patterns that regular expressions of terminals lack, or that mean something else there.
_UNKNOWN = re.compile(r"\(\?(?!:)|\\[bBkpPuAzZ0-9]|\\c|\[\^?\]")
# Matches escapes, character classes and anchors. Group 1 is set only for an anchor: escapes and classes may contain the
# same characters.
_ANCHOR = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|([\^$])", re.DOTALL)
_MAX_DEPTH = 32


def text_terminal(
    rules: GrammarRules, tool: ToolSchema, schema: Any, *, end: str, without: Sequence[str] = ()
) -> str | None:
    """Return the name of a terminal for the strings that a schema allows; None if the schema allows no string.

    The terminal ignores the keyword ``format``, and each ``pattern`` that terminals cannot express.

    Args:
        rules: rules to which terminals are added.
        tool: tool to which the schema belongs.
        schema: schema of the value.
        end: text that ends the value. If the schema limits the strings, the terminal excludes strings that contain
            ``end``. If the schema allows every string, no such exclusion is needed: the value ends at the first
            ``end``.
        without: regular expressions, in slashes. The terminal excludes the strings that match one of them.
    """
    strings = _Strings(rules, tool, [containing(end), *without])
    found = strings.terminal(schema, 0)
    if found is None:
        return None
    patterns = [*([containing(end)] if found != strings.any_text else []), *without]
    return rules.terminal(" & ".join([found, *(f"~{rules.terminal(pattern)}" for pattern in patterns)]))


def length_limits(schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
    """Return the values of the keywords ``low`` and ``high``, such as ``minItems`` and ``maxItems``.

    The default of ``low`` is 0. The default of ``high`` is None: no limit.
    """
    least, most = schema.get(low), schema.get(high)
    return least if isinstance(least, int) else 0, most if isinstance(most, int) else None


def is_limited(tool: ToolSchema, schema: Any) -> bool:
    """Return True if a schema excludes some strings, or all."""
    return _Strings(GrammarRules(), tool).terminal(schema, 0) != _Strings(GrammarRules(), tool).any_text


class _Strings:
    """Builds terminals for strings that a schema allows.

    Args:
        rules: rules to which terminals are added.
        tool: tool to which the schemas belong.
        without: regular expressions, in slashes. Constants that match one of them are left out.
    """

    def __init__(self, rules: GrammarRules, tool: ToolSchema, without: Sequence[str] = ()) -> None:
        self._rules = rules
        self._tool = tool
        self._without = [re.compile(pattern[1:-1]) for pattern in without]
        self.any_text = rules.terminal(ANY_TEXT)

    def terminal(self, schema: Any, depth: int) -> str | None:
        if not isinstance(schema, dict):
            return self.any_text if schema else None
        if depth > _MAX_DEPTH:
            return self.any_text
        if "string" not in self._tool.kinds({key: schema[key] for key in ("type",) if key in schema}):
            return None
        limits: list[str | None] = []
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(values, list):
                limits.append(self._any_of([string(one) for one in values if self._is_expressible(one)]))
        low, high = length_limits(schema, "minLength", "maxLength")
        if low or high is not None:
            limits.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
        if isinstance(schema.get("pattern"), str) and (pattern := _terminal_of(schema["pattern"])) is not None:
            limits.append(pattern)
        if "$ref" in schema:
            limits.append(self.terminal(self._tool.resolve(schema), depth + 1))
        limits += [self.terminal(one, depth + 1) for one in listed(schema, "allOf")]
        for key in ("anyOf", "oneOf"):
            if branches := listed(schema, key):
                options = [self.terminal(one, depth + 1) for one in branches]
                limits.append(self._any_of([one for one in options if one is not None]))
        if None in limits:
            return None
        names = {self._named(one): None for one in limits if one is not None}
        names.pop(self.any_text, None)
        return self._named(" & ".join(names)) if names else self.any_text

    def _is_expressible(self, value: Any) -> bool:
        return isinstance(value, str) and not any(pattern.fullmatch(value) for pattern in self._without)

    def _any_of(self, options: list[str]) -> str | None:
        if self.any_text in options:
            return self.any_text
        return self._named(" | ".join(dict.fromkeys(options))) if options else None

    def _named(self, expression: str) -> str:
        return expression if re.fullmatch(r"T\d+", expression) else self._rules.terminal(expression)


def _terminal_of(pattern: str) -> str | None:
    """Return the keyword ``pattern`` of a JSON schema as a Lark regular expression, in slashes.

    Return None if a terminal cannot express the pattern. A JSON schema's pattern may match anywhere in a text, whereas
    a terminal matches the whole text.
    """
    if _UNKNOWN.search(pattern):
        return None
    before = after = "(?s:.*)"
    if pattern.startswith("^"):
        before, pattern = "", pattern[1:]
    if pattern.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$\Z", pattern):
        after, pattern = "", pattern[:-1]
    if any(found[1] for found in _ANCHOR.finditer(pattern)):
        return None
    try:
        re.compile(pattern)
    except re.error:
        return None
    if not (before and after) and _has_top_level_choice(pattern):
        return None
    text = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n").replace("@", r"\x40")
    return f"/{before}(?:{text}){after}/"


def _has_top_level_choice(pattern: str) -> bool:
    """Return True if a pattern has alternatives outside of parentheses. An anchor belongs to only one alternative."""
    depth = 0
    for found in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|([()|])", pattern, re.DOTALL):
        if found[1] == "|" and not depth:
            return True
        depth += {"(": 1, ")": -1}.get(found[1], 0)
    return False
