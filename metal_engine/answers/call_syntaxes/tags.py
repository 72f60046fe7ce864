"""Calls as tags, with an element for each argument: Qwen3-Coder, GLM, MiniMax and others.

Each argument occurs once, in the order of the tool's schema. A string is raw text up to the first closing tag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

from metal_engine.answers.call_syntaxes.lark import GAP, GrammarRules, NotExpressibleError, mark, string
from metal_engine.answers.call_syntaxes.syntax import Quotes, checked_name, choice
from metal_engine.answers.call_syntaxes.tool_schemas import KINDS, ToolSchema
from metal_engine.answers.call_syntaxes.values import RawValues, after_space
from metal_engine.answers.deltas import json_text
from metal_engine.errors import ParameterError
from metal_engine.output_phases import CallTrigger

_NAME = re.compile(r"[^\s<>\"'@&{}\\]{1,256}")
_OTHER_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,40}/"
_FIELD = re.compile(r"(\{name\}|\{number\}|\{type\}|~)")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class TagSyntax:
    """Exact form of calls as tags. Implements :class:`metal_engine.answers.call_syntaxes.syntax.CallSyntax`.

    Templates are texts that may contain ``{name}``, ``{number}`` (one to three digits), ``{type}`` (a word for the type
    of an argument) and ``~`` (optional white space), e.g. ``<parameter={name}>``.

    Attributes:
        mark: mark that begins the calls.
        call: template of the opening tag of a call.
        argument: template of the opening tag of an argument.
        value_end: text that ends a value: the closing tag of an argument, or the beginning of that tag.
        argument_end: rest of an argument's closing tag after ``value_end``; empty if there is no rest.
        call_end: closing tag of a call; empty if ``end`` follows the arguments.
        end: mark that ends the calls.
        without: texts that a string value cannot contain.
        hidden: prefix of encoded strings, such as ``<![CDATA[``, which the reader decodes; empty if the format has no
            encoded strings.
        several: True if one mark may begin several calls.
        bare: True if a call may begin with its opening tag, without the mark.
        pad: text that may precede and follow each value, such as a line break.
        python: True if values may also be Python's ``True``, ``False`` and ``None``.
        untyped: JSON types that the grammar allows for a value whose schema does not limit the type.
    """

    mark: str
    call: str
    argument: str
    value_end: str
    call_end: str
    end: str
    without: tuple[str, ...]
    argument_end: str = ""
    hidden: str = ""
    several: bool = False
    bare: bool = False
    pad: str = ""
    python: bool = False
    untyped: frozenset[str] = field(default=KINDS)

    def quotes(self, tools: Sequence[ToolSchema]) -> Quotes:
        @cache
        def is_json(name: str) -> bool:
            for tool in tools:
                try:
                    listed, others = tool.arguments()
                except ParameterError:
                    continue
                schemas = {argument.name: argument.schema for argument in listed}
                if not tool.kinds(schemas.get(name, others)).isdisjoint(("object", "array")):
                    return True
            return False

        opening = self.argument[: self.argument.index("{name}")]
        broken = "|".join(map(re.escape, self.without))
        after = self.argument_end[:1] or "<"
        return Quotes({opening: re.escape(self.value_end)}, broken, after, self._argument_pattern, is_json)

    # --- grammar ---

    def triggers(self, tools: Sequence[ToolSchema], *, parallel: bool) -> tuple[CallTrigger, ...]:
        rules = GrammarRules()
        one = rules.rule(self._any_call(rules, tools))
        several = f"{one}+" if parallel and self.several else one
        triggers = [rules.trigger(self.mark, f"{GAP} {several} {mark(self.end)}")]
        if self.bare:
            rules = GrammarRules()
            opening, closing = self.call.split("{name}")
            calls = [f"{mark(tool.name)} {mark(closing)} {self._arguments_rule(rules, tool)}" for tool in tools]
            one = choice([rules.rule(call) for call in calls])
            triggers.append(rules.trigger(opening, f"{one} {mark(self.end)}"))
        return tuple(triggers)

    def _any_call(self, rules: GrammarRules, tools: Sequence[ToolSchema]) -> str:
        """Return a Lark expression for a call of any of the tools."""
        return choice([self._call(rules, tool) for tool in tools])

    def _call(self, rules: GrammarRules, tool: ToolSchema) -> str:
        name = checked_name(_NAME, tool.name)
        return rules.rule(f"{expression(self.call, name=mark(name))} {self._arguments_rule(rules, tool)}")

    def _arguments_rule(self, rules: GrammarRules, tool: ToolSchema) -> str:
        return rules.arguments(tool, partial(self._arguments, rules))

    def _arguments(self, rules: GrammarRules, tool: ToolSchema) -> str:
        listed, others = tool.arguments()
        parts = [GAP]
        for argument in listed:
            try:
                name = mark(checked_name(_NAME, argument.name))
                one = self._argument(rules, tool, name, argument.schema)
            except NotExpressibleError:
                if argument.is_required:
                    raise
                continue
            parts.append(one if argument.is_required else f"{one}?")
        if others is not False:
            known = rules.terminal(" | ".join([string(""), *(string(one.name) for one in listed)]))
            name = rules.terminal(f"{_OTHER_NAME} & ~{known}")
            parts.append(self._argument(rules, tool, name, others) + "*")
        ending = [mark(self.call_end), GAP] if self.call_end else []
        return rules.rule(" ".join([*parts, *ending]))

    def _argument(self, rules: GrammarRules, tool: ToolSchema, name: str, schema: Any) -> str:
        """Return the name of a rule for an argument: opening tag, value and closing tag.

        Args:
            name: Lark expression for the name of the argument.
            schema: schema of the value.

        Raises:
            NotExpressibleError: the format cannot express any value that the schema allows.
        """
        value = self._values.grammar(rules, tool, schema)
        ending = mark(self.argument_end) if self.argument_end else ""
        return rules.rule(f"{expression(self.argument, name=name)} {value} {ending} {GAP}")

    @cached_property
    def _values(self) -> RawValues:
        options = {"hidden": self.hidden, "pad": self.pad}
        return RawValues(self.value_end, self.without, python=self.python, untyped=self.untyped, **options)

    # --- reader ---

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        known = {tool.name: tool for tool in tools}
        calls: list[dict[str, Any]] = []
        at = after_space(text, 0)
        while at < len(text) and (self.several or not calls):
            opening = self._call_pattern.match(text, at)
            tool = known.get(opening["name"]) if opening is not None else None
            if opening is None or tool is None:
                return None
            found = self._read_arguments(text, opening.end(), tool)
            if found is None:
                return None
            arguments, at = found
            calls.append({"name": tool.name, "arguments": arguments})
        return calls if at == len(text) else None

    def _read_arguments(self, text: str, at: int, tool: ToolSchema) -> tuple[str, int] | None:
        """Return the arguments that begin at a position, as JSON text, and the position after the call.

        Return None if the text is not in this form.
        """
        listed, others = tool.arguments()
        schemas = {argument.name: argument.schema for argument in listed}
        written: dict[str, str] = {}
        at = after_space(text, at)
        while (opening := self._argument_pattern.match(text, at)) is not None:
            name = opening["name"]
            value = self._read_value(text, opening, tool, schemas.get(name, True if others is False else others))
            if value is None or (name in written and name in schemas):
                return None
            written[name], at = value
            if not text.startswith(self.argument_end, at):
                return None
            at = after_space(text, at + len(self.argument_end))
        if not text.startswith(self.call_end, at):
            return None
        return object_text(written), after_space(text, at + len(self.call_end))

    def _read_value(self, text: str, opening: re.Match[str], tool: ToolSchema, schema: Any) -> tuple[str, int] | None:
        """Return the value after the tag ``opening``, as JSON text, and the position after ``value_end``.

        Return None if the value has no end, or does not fit the schema.
        """
        return self._values.read(text, opening.end(), tool, schema)

    @cached_property
    def _call_pattern(self) -> re.Pattern[str]:
        return _pattern(self.call)

    @cached_property
    def _argument_pattern(self) -> re.Pattern[str]:
        return _pattern(self.argument)


def object_text(values: dict[str, str]) -> str:
    """Return the JSON text of an object whose values are JSON texts."""
    return "{" + ", ".join(f"{json_text(name)}: {value}" for name, value in values.items()) + "}"


def expression(template: str, *, name: str, kind: str = "") -> str:
    """Return a Lark expression for a template of a tag (see :class:`TagSyntax`).

    Args:
        template: template of an opening tag.
        name: Lark expression for ``{name}``.
        kind: text for ``{type}``.
    """
    fields = {"{name}": name, "{number}": "/[0-9]{1,3}/", "~": GAP}
    parts = _FIELD.split(template.replace("{type}", kind))
    return " ".join(fields.get(part) or mark(part) for part in parts if part)


def _pattern(template: str) -> re.Pattern[str]:
    fields = {
        "{name}": rf"(?P<name>{_NAME.pattern})",
        "{number}": r"[0-9]{1,3}",
        "{type}": r"(?P<type>\w+)",
        "~": _SPACE.pattern,
    }
    return re.compile("".join(fields.get(part) or re.escape(part) for part in _FIELD.split(template) if part))
