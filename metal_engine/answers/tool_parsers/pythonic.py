"""Tool calls as a Python list of calls, or as lines: ``[get_weather(city="Rome", days=3), find_trains()]``."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from metal_engine.answers.tool_parsers.json_calls import JSON_CALLS

# A string literal. An unclosed literal extends to the end of the text: searching from each quote would be quadratic.
# Models write line breaks in literals as they are, which Python does not allow.
_STRING = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\(?:.|\Z))*+(?:\1|\Z)""", re.DOTALL)
_ESCAPE_OR_BREAK = re.compile(r"(\\.)|\n", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicCalls:
    """Parser of calls with keyword arguments whose values are literals.

    Args:
        start: mark that begins the calls.
        end: mark that ends the calls.
        has_lines: True if each call has a line of its own; False for a list.
    """

    def __init__(self, start: str, end: str, *, has_lines: bool = False) -> None:
        self.tool_call_start = start
        self.tool_call_end = end
        self._has_lines = has_lines

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> list[dict[str, Any]]:
        """Return the calls in a text. Raises an exception of any type if the text does not consist of calls only.

        The calls may also be JSON objects, which LFM2 writes if the prompt asks for them.
        """
        if text.lstrip("[ \t\r\n").startswith("{"):
            return JSON_CALLS.parse_tool_call(text)
        source = _STRING.sub(_escaped, text.strip())
        with warnings.catch_warnings(action="ignore"):  # an unknown escape would be written to stderr
            parsed = ast.parse(source) if self._has_lines else ast.parse(source, mode="eval").body
        if isinstance(parsed, ast.Module):
            return [_call(statement.value) for statement in map(_expression, parsed.body)]
        if not isinstance(parsed, ast.List):
            raise ValueError("the text is not a Python list")
        return [_call(node) for node in parsed.elts]


def _escaped(literal: re.Match[str]) -> str:
    return _ESCAPE_OR_BREAK.sub(lambda found: found[1] or r"\n", literal[0])


class _JSONNames(ast.NodeTransformer):
    """Replaces the names ``true``, ``false`` and ``null``, which models write in nested values, by Python constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _expression(statement: ast.stmt) -> ast.Expr:
    if not isinstance(statement, ast.Expr):
        raise ValueError("a line is not a call")
    return statement


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a list item is not a call with keyword arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument has no name")
        if keyword.arg in arguments:
            raise ValueError("an argument occurs twice")
        arguments[keyword.arg] = ast.literal_eval(_JSONNames().visit(keyword.value))
    return {"name": ast.unparse(node.func), "arguments": arguments}
