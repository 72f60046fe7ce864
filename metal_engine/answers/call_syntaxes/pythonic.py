"""Calls in Python's syntax, as a list or on lines: ``[get_weather(city="Rome", days=3), find_trains()]``.

Each argument occurs once, in the order of the tool's schema. Values are JSON, or ``True``, ``False`` and ``None``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from metal_engine.answers.call_syntaxes.lark import GAP, GrammarRules, NameNotExpressibleError, json_value, mark, string
from metal_engine.answers.call_syntaxes.syntax import Quotes, checked_name, choice
from metal_engine.answers.call_syntaxes.tags import object_text
from metal_engine.answers.call_syntaxes.tool_schemas import Argument, ToolSchema
from metal_engine.answers.call_syntaxes.values import DECODER, PYTHON_LITERALS, python_literals
from metal_engine.output_phases import CallTrigger

_NAME = re.compile(r"[^\W\d][\w.-]{0,255}")
_KEY = re.compile(r"[^\W\d]\w{0,255}")
_OTHER_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,40}/"
_SPACE = r"[ \t\r\n]*"
_CALL = re.compile(rf"{_SPACE}(?P<name>{_NAME.pattern})\({_SPACE}")
_ARGUMENT = re.compile(rf"{_SPACE}(?P<name>{_KEY.pattern}){_SPACE}={_SPACE}")
_LITERAL = re.compile("|".join(PYTHON_LITERALS))
_COMMA = re.compile(rf"{_SPACE},")
_LINE = re.compile(r"[ \t\r]*\n")
_CLOSING = re.compile(rf"{_SPACE}\)")
_QUOTES = Quotes({'"': r'(?s:\\.)|"', "'": r"(?s:\\.)|'"}, after=":,)]}")


def in_order(rules: GrammarRules, items: Sequence[tuple[str, bool]], others: str | None) -> str:
    """Return the name of a rule for items in a fixed order, with commas between them.

    Args:
        items: Lark expression of each item, and True if the item must occur.
        others: Lark expression for any number of further items at the end; None if no others are allowed.
    """
    comma = f'{GAP} "," {GAP}'
    first = rules.rule(f'{others} ({comma} {others})* | ""' if others else '""')
    later = rules.rule(f"({comma} {others})*" if others else '""')
    for item, is_required in reversed(items):
        begun = f"{item} {later}"
        first = rules.rule(begun if is_required else f"{begun} | {first}")
        later = rules.rule(f"{comma} {begun}" if is_required else f"{comma} {begun} | {later}")
    return first


def other_names(rules: GrammarRules, listed: Sequence[Argument], pattern: str) -> str:
    """Return the name of a terminal for names of arguments that are not in ``listed``.

    Args:
        listed: arguments with their own rules.
        pattern: regular expression, in slashes, that the names must match.
    """
    known = rules.terminal(" | ".join([string(""), *(string(one.name) for one in listed)]))
    return rules.terminal(f"{pattern} & ~{known}")


@dataclass(frozen=True)
class PythonicSyntax:
    """Exact form of calls in Python's syntax.

    Implements :class:`metal_engine.answers.call_syntaxes.syntax.CallSyntax`.

    Attributes:
        mark: mark that begins the calls.
        end: mark that ends the calls.
        has_lines: True if each call has a line of its own. False if the calls are a Python list; without the marks,
            such a list may also be the whole content.
    """

    mark: str
    end: str
    has_lines: bool = False

    def quotes(self, tools: Sequence[ToolSchema]) -> Quotes:
        return _QUOTES

    def triggers(self, tools: Sequence[ToolSchema], *, parallel: bool) -> tuple[CallTrigger, ...]:
        rules = GrammarRules()
        one, more, _ = self._calls(rules, tools, parallel)
        opening = GAP if self.has_lines else f'{GAP} "[" {GAP}'
        marked = rules.trigger(self.mark, f"{opening} {one} {more} {GAP} {mark(self.end)}")
        if self.has_lines:
            return (marked,)
        rules = GrammarRules()
        bare, more, arguments = self._calls(rules, tools, parallel)
        heads = tuple((f"{name}(", rules.rule(f"{rest} {more}")) for name, rest in arguments.items())
        return marked, rules.trigger("[", f"{bare} {more}", heads, is_whole=True)

    def _calls(
        self, rules: GrammarRules, tools: Sequence[ToolSchema], parallel: bool
    ) -> tuple[str, str, dict[str, str]]:
        """Return the names of the rules of a list of calls, or of calls on lines.

        Returns:
            The rule for the first call, the rule for all text after the first call, and a map from each tool's name to
            the rule for the text after its opening parenthesis.
        """
        arguments = {}
        for tool in tools:
            listed = rules.arguments(tool, partial(self._arguments, rules))
            arguments[checked_name(_NAME, tool.name)] = rules.rule(f'{GAP} {listed} {GAP} ")"')
        one = rules.rule(choice([rules.rule(f"{string(name + '(')} {rest}") for name, rest in arguments.items()]))
        separator = "/[ \\t\\r]{0,8}\\n/" if self.has_lines else f'{GAP} ","'
        more = f"({separator} {GAP} {one})*" if parallel else '""'
        return one, rules.rule(more if self.has_lines else f'{more} {GAP} "]"'), arguments

    def _arguments(self, rules: GrammarRules, tool: ToolSchema) -> str:
        listed, others = tool.arguments()
        items = []
        for argument in listed:
            if _KEY.fullmatch(argument.name) is not None:
                value = self._value(rules, tool, argument.schema)
                items.append((f"{string(argument.name + '=')} {value}", argument.is_required))
            elif argument.is_required:
                raise NameNotExpressibleError
        other = None
        if others is not False:
            other = f'{other_names(rules, listed, _OTHER_KEY)} "=" {self._value(rules, tool, others)}'
        return in_order(rules, items, other)

    def _value(self, rules: GrammarRules, tool: ToolSchema, schema: Any) -> str:
        literals = python_literals(tool, schema)
        return rules.rule(" | ".join([json_value(tool.alone(schema), strict=tool.is_strict), *literals]))

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        known = {tool.name: tool for tool in tools}
        calls: list[dict[str, Any]] = []
        text = text.strip()
        opening, separator, end = ("", _LINE, "") if self.has_lines else ("[", _COMMA, "]")
        if not text.startswith(opening):
            return None
        at = len(opening)
        while (head := _CALL.match(text, at)) is not None and head["name"] in known:
            read = self._read_arguments(text, head.end(), known[head["name"]])
            if read is None:
                return None
            arguments, at = read
            calls.append({"name": head["name"], "arguments": arguments})
            found = separator.match(text, at)
            if found is None:
                break
            at = found.end()
        return calls if calls and text[at:].strip() == end else None

    def _read_arguments(self, text: str, at: int, tool: ToolSchema) -> tuple[str, int] | None:
        """Return the arguments that begin at a position, as JSON text, and the position after the call.

        Return None if the text is not in this form.

        Raises:
            ValueError: a value is not JSON.
        """
        listed = {argument.name for argument in tool.arguments()[0]}
        written: dict[str, str] = {}
        while (opening := _ARGUMENT.match(text, at)) is not None:
            name = opening["name"]
            literal = _LITERAL.match(text, opening.end())
            if literal is not None:
                value, at = json.dumps(PYTHON_LITERALS[literal[0]]), literal.end()
            else:
                at = DECODER.raw_decode(text, opening.end())[1]
                value = text[opening.end() : at]
            if name in written and name in listed:
                return None
            written[name] = value
            comma = _COMMA.match(text, at)
            if comma is None:
                break
            at = comma.end()
        closing = _CLOSING.match(text, at)
        return None if closing is None else (object_text(written), closing.end())


PYTHONIC = PythonicSyntax("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA4 = PythonicSyntax("<|python_start|>", "<|python_end|>")
OLMO3 = PythonicSyntax("<function_calls>", "</function_calls>", has_lines=True)
