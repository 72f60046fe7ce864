"""Gemma's calls: ``call:get_weather{city:<|"|>Rome<|"|>,days:3}``. FunctionGemma writes ``<escape>`` as quotes.

Each property occurs once, in the order of the schema. A string is raw text up to the next quote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metal_engine.answers.call_syntaxes.lark import (
    GAP,
    GrammarRules,
    NotExpressibleError,
    TextNotExpressibleError,
    mark,
    string,
)
from metal_engine.answers.call_syntaxes.pythonic import in_order, other_names
from metal_engine.answers.call_syntaxes.strings import length_limits, text_terminal
from metal_engine.answers.call_syntaxes.syntax import Quotes, checked_name, choice
from metal_engine.answers.call_syntaxes.tags import object_text
from metal_engine.answers.call_syntaxes.tool_schemas import ToolSchema
from metal_engine.answers.call_syntaxes.values import after_space, json_of
from metal_engine.answers.deltas import json_text
from metal_engine.json_schemas.document import listed
from metal_engine.output_phases import CallTrigger

_NAME = re.compile(r"[^\s<>:,@{}\[\]]{1,256}")
_OTHER_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,40}/"
_CALL = re.compile(rf"[ \t\r\n]*:?call:(?P<name>{_NAME.pattern})(?=\{{)")
_KEY = re.compile(rf"(?P<name>{_NAME.pattern}):")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class GemmaSyntax:
    """Exact form of Gemma's calls. Implements :class:`metal_engine.answers.call_syntaxes.syntax.CallSyntax`.

    Attributes:
        mark: mark that begins a call.
        end: mark that ends a call.
        quote: text before and after a string, e.g. ``<escape>``.
    """

    mark: str
    end: str
    quote: str

    def quotes(self, tools: Sequence[ToolSchema]) -> Quotes:
        return Quotes({self.quote: re.escape(self.quote)}, after=":,}]")

    def triggers(self, tools: Sequence[ToolSchema], *, parallel: bool) -> tuple[CallTrigger, ...]:
        rules = GrammarRules()
        calls = []
        for tool in tools:
            name = mark("call:" + checked_name(_NAME, tool.name))
            arguments = rules.arguments(tool, lambda one: _Values(rules, one, self.quote).object(one.schema))
            calls.append(f"{name} {arguments}")
        call = f"{GAP} {choice([rules.rule(one) for one in calls])} {GAP} {mark(self.end)}"
        return (rules.trigger(self.mark, call),)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        known = {tool.name for tool in tools}
        opening = _CALL.match(text)
        if opening is None or opening["name"] not in known:
            return None
        arguments, at = self._read(text, opening.end())
        if text[at:].strip(" \t\r\n"):
            return None
        return [{"name": opening["name"], "arguments": arguments}]

    def _read(self, text: str, at: int) -> tuple[str, int]:
        """Return the value at a position as JSON text, and the position after the value.

        Raises:
            ValueError: no value in this format begins at the position, or the value is incomplete.
        """
        if text.startswith(self.quote, at):
            start = at + len(self.quote)
            end = text.index(self.quote, start)
            return json_text(text[start:end]), end + len(self.quote)
        if text.startswith("{", at):
            return self._read_object(text, at + 1)
        if text.startswith("[", at):
            return self._read_list(text, at + 1)
        scalar = _SCALAR.match(text, at)
        if scalar is None:
            raise ValueError("there is no value")
        return scalar[0], scalar.end()

    def _read_object(self, text: str, at: int) -> tuple[str, int]:
        written: dict[str, str] = {}
        at = after_space(text, at)
        while not text.startswith("}", at):
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError("a property has no name")
            written[key["name"]], at = self._read(text, after_space(text, key.end()))
            at = _after_comma(text, at, "}")
        return object_text(written), at + 1

    def _read_list(self, text: str, at: int) -> tuple[str, int]:
        items = []
        at = after_space(text, at)
        while not text.startswith("]", at):
            item, at = self._read(text, at)
            items.append(item)
            at = _after_comma(text, at, "]")
        return f"[{', '.join(items)}]", at + 1


def _after_comma(text: str, at: int, end: str) -> int:
    """Skip white space and a comma. Return the position after them, or the position of ``end`` in place of the comma.

    Raises:
        ValueError: neither a comma nor ``end`` follows.
    """
    at = after_space(text, at)
    if text.startswith(end, at):
        return at
    if not text.startswith(",", at):
        raise ValueError("there is no comma")
    return after_space(text, at + 1)


def _repeated(item: str, low: int, high: int | None) -> str:
    """Return a Lark expression for ``low`` to ``high`` occurrences of ``item``. ``high`` is None for no limit."""
    return "" if high == 0 else f"({item}){{{low},{'' if high is None else high}}}"


class _Values:
    """Builds the rules for values that a tool's schema allows.

    Does not enforce keywords that relate several properties of an object or several items of a list, such as
    ``uniqueItems``.
    """

    def __init__(self, rules: GrammarRules, tool: ToolSchema, quote: str) -> None:
        self._rules = rules
        self._tool = tool
        self._quote = quote
        self._referenced: dict[str, str] = {}

    def value(self, schema: Any) -> str:
        """Return the name of a rule for the values that a schema allows.

        Raises:
            NotExpressibleError: the format cannot express any of the values.
        """
        if isinstance(schema, dict) and "$ref" in schema:
            return self._reference(schema)
        if schema in (True, {}):
            return self._anything()
        if not isinstance(schema, dict):
            raise NotExpressibleError
        if "allOf" in schema and "object" not in self._tool.kinds(schema):
            schema = self._merged(schema)
        known = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(known, list):
            return self._first_of(known, self._constant)
        for key in ("anyOf", "oneOf"):
            if listed(schema, key) and "properties" not in schema and "items" not in schema:
                kinds = self._tool.kinds(schema)
                branches = [one for one in listed(schema, key) if self._tool.kinds(one) & kinds]
                return self._first_of(branches, self.value)
        kinds = self._tool.kinds(schema)
        kinds -= {"integer"} if "number" in kinds else set()
        return self._first_of(sorted(kinds), lambda kind: getattr(self, kind)(schema))

    def _reference(self, schema: dict[str, Any]) -> str:
        pointer = json.dumps(schema, sort_keys=True)
        if pointer not in self._referenced:
            name = self._referenced[pointer] = self._rules.reserve()
            others = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", "description")}
            target = self._tool.resolve(schema)
            try:
                self._rules.define(name, self.value({"allOf": [target, others]} if others else target))
            except NotExpressibleError:
                del self._referenced[pointer]
                raise
        return self._referenced[pointer]

    def _anything(self) -> str:
        """Return the name of a rule for a value of any type."""
        if "" not in self._referenced:
            name = self._referenced[""] = self._rules.reserve()
            options = [getattr(self, kind)({}) for kind in ("null", "boolean", "number", "string", "array", "object")]
            self._rules.define(name, choice([self._rules.rule(option) for option in options]))
        return self._referenced[""]

    def _merged(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a schema in which ``allOf`` is replaced by the keywords of its members.

        If a keyword occurs several times, the schema's own keyword wins, then the keyword of the last member.
        """
        merged: dict[str, Any] = {}
        for one in (*listed(schema, "allOf"), {key: value for key, value in schema.items() if key != "allOf"}):
            while isinstance(one, dict) and set(one) == {"$ref"}:
                one = self._tool.resolve(one)
            merged |= one if isinstance(one, dict) else {}
        return merged

    def _first_of(self, options: Sequence[Any], rule: Callable[[Any], str]) -> str:
        """Return the name of a rule that matches any one of the options. Leave out options that cannot be expressed.

        Args:
            options: values, schemas or types.
            rule: takes an option. Returns a Lark expression for it, or raises NotExpressibleError.

        Raises:
            NotExpressibleError: no option can be expressed.
        """
        rules = []
        problem = NotExpressibleError()
        for option in options:
            try:
                rules.append(self._rules.rule(rule(option)))
            except TextNotExpressibleError as error:
                problem = error
            except NotExpressibleError:
                pass
        if not rules:
            raise problem
        return self._rules.rule(choice(rules))

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            if self._quote in value:
                raise TextNotExpressibleError(self._quote)
            return f"{mark(self._quote)} {string(value)} {mark(self._quote)}" if value else f"{mark(self._quote * 2)}"
        if isinstance(value, list):
            items = ' "," '.join(self._constant(item) for item in value)
            return f'"[" {items} "]"'
        if isinstance(value, dict):
            items = ' "," '.join(
                f"{string(checked_name(_NAME, key) + ':')} {self._constant(item)}" for key, item in value.items()
            )
            return f'"{{" {items} "}}"'
        return string(json.dumps(value))

    # --- one method for each type ---

    def string(self, schema: Any) -> str:
        terminal = text_terminal(self._rules, self._tool, schema, end=self._quote)
        if terminal is None:
            raise NotExpressibleError
        return f"{mark(self._quote)} {self._rules.text_until(terminal, self._quote)}"

    def number(self, schema: Any) -> str:
        return json_of(self._tool, schema, frozenset({"number", "integer"}))

    def integer(self, schema: Any) -> str:
        return json_of(self._tool, schema, frozenset({"integer"}))

    def boolean(self, schema: Any) -> str:
        return '("true" | "false")'

    def null(self, schema: Any) -> str:
        return '"null"'

    def array(self, schema: Any) -> str:
        comma = f'{GAP} "," {GAP}'
        prefix = [self.value(one) for one in listed(schema, "prefixItems")]
        rest = schema.get("items", True)
        low, high = length_limits(schema, "minItems", "maxItems")
        item = self.value(rest) if rest is not False else None
        if prefix:
            items = self._tuple(prefix, item, low, high)
        elif item is None or high == 0:
            items = ""
        else:
            more = _repeated(f"{comma} {item}", max(low - 1, 0), None if high is None else high - 1)
            items = f"{item} {more}" if low else f"({item} {more})?"
        return self._rules.rule(f'"[" {GAP} {items} {GAP} "]"')

    def _tuple(self, prefix: list[str], item: str | None, low: int, high: int | None) -> str:
        """Return the name of a rule for the items of a list. Its first items have their own schemas (``prefixItems``).

        Args:
            prefix: names of the rules for the first items, in their order.
            item: name of the rule for each item after ``prefix``; None if no more items are allowed.
            low: least number of items.
            high: greatest number of items; None: no limit.
        """
        num_listed = len(prefix) if high is None else min(len(prefix), high)
        items = [(one, at < low) for at, one in enumerate(prefix[:num_listed])]
        comma = f'{GAP} "," {GAP}'
        rest = '""'
        if item is not None and (high is None or high > num_listed):
            most = None if high is None else high - num_listed
            rest = _repeated(f"{comma} {item}", max(low - num_listed, 0), most)
        rest = self._rules.rule(rest)
        for at in range(len(items) - 1, -1, -1):
            begun = f"{comma if at else ''} {items[at][0]} {rest}"
            rest = self._rules.rule(begun if items[at][1] else f'{begun} | ""')
        return rest

    def object(self, schema: Any) -> str:
        properties, others = self._tool.arguments(schema)
        items = []
        for one in properties:
            try:
                key = string(checked_name(_NAME, one.name) + ":")
                items.append((f"{key} {self.value(one.schema)}", one.is_required))
            except NotExpressibleError:
                if one.is_required:
                    raise
        other = None
        if others is not False:
            name = other_names(self._rules, properties, _OTHER_KEY)
            other = f'{name} ":" {self.value(others)}'
        return self._rules.rule(f'"{{" {GAP} {in_order(self._rules, items, other)} {GAP} "}}"')


GEMMA4 = GemmaSyntax("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaSyntax("<start_function_call>", "<end_function_call>", "<escape>")
