"""Formats of calls as tags, one for each family of models, as instances of ``TagSyntax``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from metal_engine.answers.call_syntaxes.json_formats import HERMES, json_call
from metal_engine.answers.call_syntaxes.lark import (
    GAP,
    GrammarRules,
    TextNotExpressibleError,
    containing,
    json_value,
    mark,
)
from metal_engine.answers.call_syntaxes.strings import text_terminal
from metal_engine.answers.call_syntaxes.syntax import JSON_QUOTES, Quotes, choice
from metal_engine.answers.call_syntaxes.tags import TagSyntax, expression
from metal_engine.answers.call_syntaxes.tool_schemas import ToolSchema
from metal_engine.answers.call_syntaxes.values import DECODER, after_space, json_of, not_expressible
from metal_engine.answers.deltas import json_text

_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)

QWEN3_CODER = TagSyntax(
    mark="<tool_call>",
    call="<function={name}>",
    argument="<parameter={name}>",
    value_end="</parameter>",
    call_end="</function>",
    end="</tool_call>",
    without=("<parameter=",),
    bare=True,
    pad="\n",
    python=True,
    untyped=frozenset({"string", "object", "array"}),
)


def _glm(form: type[TagSyntax], prefix: str = "") -> TagSyntax:
    """Return the form of GLM's calls, as an instance of ``form``. All tag names begin with ``prefix``."""
    return form(
        mark=f"<{prefix}tool_call>",
        call="{name}",
        argument=f"<{prefix}arg_key>{{name}}</{prefix}arg_key>~<{prefix}arg_value>",
        value_end=f"</{prefix}arg_value>",
        call_end="",
        end=f"</{prefix}tool_call>",
        without=(f"<{prefix}arg_value>", f"<{prefix}arg_key>"),
    )


class _LongCat(TagSyntax):
    """Form of LongCat's calls. LongCat's first models write a JSON object instead of tags."""

    def quotes(self, tools: Sequence[ToolSchema]) -> Quotes:
        tags = super().quotes(tools)
        return replace(tags, pairs={**tags.pairs, **JSON_QUOTES.pairs}, after=tags.after + JSON_QUOTES.after)

    def _any_call(self, rules: GrammarRules, tools: Sequence[ToolSchema]) -> str:
        return choice([rules.rule(super()._any_call(rules, tools)), rules.rule(json_call(rules, tools))])

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        return super().read(text, tools) or HERMES.read(text, tools)


GLM = _glm(TagSyntax)
LONGCAT = _glm(_LongCat, "longcat_")
MINIMAX_M2 = TagSyntax(
    mark="<minimax:tool_call>",
    call='<invoke name="{name}">',
    argument='<parameter name="{name}">',
    value_end="</parameter>",
    call_end="</invoke>",
    end="</minimax:tool_call>",
    without=("<parameter name=",),
    several=True,
)
MUSE_SPARK = TagSyntax(
    mark="<atem:function_calls>",
    call='<atem:invoke name="{name}">',
    argument='<atem:parameter name="{name}">',
    value_end="</atem:parameter>",
    call_end="</atem:invoke>",
    end="</atem:function_calls>",
    without=("<atem:parameter",),
    several=True,
)


class _MiniCPM5(TagSyntax):
    """Form of MiniCPM5's calls. A string may be a CDATA section."""

    def _read_value(self, text: str, opening: re.Match[str], tool: ToolSchema, schema: Any) -> tuple[str, int] | None:
        start, end = opening.end(), text.find(self.value_end, opening.end())
        section = _CDATA.fullmatch(text, start, end) if end >= 0 else None
        if section is None:
            return super()._read_value(text, opening, tool, schema)
        found = self._values.read(section[1] + self.value_end, 0, tool, schema)
        return None if found is None else (found[0], end + len(self.value_end))


MINICPM5 = _MiniCPM5(
    mark="<function name=",
    call='"{name}">',
    argument='<param name="{name}">',
    value_end="</param>",
    call_end="",
    end="</function>",
    without=("<param name=",),
    hidden="<![CDATA[",
)


class _TypedTagSyntax(TagSyntax):
    """Form of calls in which the opening tag of an argument names the type of the value."""

    def _text(self, rules: GrammarRules, tool: ToolSchema, schema: Any) -> str | None:
        """Return the name of a terminal for the strings that a schema allows; None if the form cannot express any."""
        without = [containing(text) for text in self.without]
        return text_terminal(rules, tool, schema, end=self.value_end, without=without)


_JSON_OPENING, _JSON_CLOSING = '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"


@dataclass(frozen=True)
class _KimiK3(_TypedTagSyntax):
    """Form of Kimi K3's calls. The opening tag of an argument names its type, or one JSON object has all arguments."""

    def quotes(self, tools: Sequence[ToolSchema]) -> Quotes:
        tags = super().quotes(tools)
        value = re.compile(f"{self._argument_pattern.pattern}|{re.escape(_JSON_OPENING)}")
        return replace(
            tags,
            pairs={**tags.pairs, _JSON_OPENING: re.escape(self.value_end)},
            after=tags.after + "j",
            value=value,
            is_json=lambda name: name is None or tags.is_json(name),
        )

    def _arguments(self, rules: GrammarRules, tool: ToolSchema) -> str:
        arguments = json_value(tool.schema, strict=tool.is_strict)
        whole = f"{mark(_JSON_OPENING)} {arguments} {mark(_JSON_CLOSING)} {GAP} {mark(self.call_end)} {GAP}"
        try:
            return rules.rule(f"{super()._arguments(rules, tool)} | {GAP} {whole}")
        except TextNotExpressibleError:  # JSON expresses every text
            return rules.rule(f"{GAP} {whole}")

    def _read_arguments(self, text: str, at: int, tool: ToolSchema) -> tuple[str, int] | None:
        start = after_space(text, at)
        if not text.startswith(_JSON_OPENING, start):
            return super()._read_arguments(text, at, tool)
        start += len(_JSON_OPENING)
        end = DECODER.raw_decode(text, start)[1]
        if not text.startswith(_JSON_CLOSING, end):
            return None
        after = after_space(text, end + len(_JSON_CLOSING))
        if not text.startswith(self.call_end, after):
            return None
        return text[start:end], after_space(text, after + len(self.call_end))

    def _argument(self, rules: GrammarRules, tool: ToolSchema, name: str, schema: Any) -> str:
        kinds = tool.kinds(schema)
        options = []
        terminal = self._text(rules, tool, schema) if "string" in kinds else None
        if terminal is not None:
            options.append(("string", rules.text_until(terminal, self.value_end)))
        for kind in sorted(kinds - {"string"} - ({"integer"} if "number" in kinds else set())):
            named = "number" if kind == "integer" else kind
            group = kinds & {"integer", "number"} if named == "number" else frozenset({kind})
            options.append((named, f"{json_of(tool, schema, group)} {mark(self.value_end)}"))
        if not options:
            raise not_expressible(kinds, self.value_end, *self.without)
        tags = [f"{expression(self.argument, name=name, kind=kind)} {value}" for kind, value in options]
        return rules.rule(f"({' | '.join(tags)}) {mark(self.argument_end)} {GAP}")

    def _read_value(self, text: str, opening: re.Match[str], tool: ToolSchema, schema: Any) -> tuple[str, int] | None:
        start = opening.end()
        if opening["type"] != "string":
            end = DECODER.raw_decode(text, start)[1]
            is_whole = text.startswith(self.value_end, end)
            return (text[start:end], end + len(self.value_end)) if is_whole else None
        end = text.find(self.value_end, start)
        raw = text[start:end]
        is_whole = end >= 0 and not any(one in raw for one in self.without)
        return (json_text(raw), end + len(self.value_end)) if is_whole else None


KIMI_K3 = _KimiK3(
    mark="<|open|>tools<|sep|>",
    call='<|open|>call tool="{name}" index="{number}"<|sep|>',
    argument='<|open|>argument key="{name}" type="{type}"<|sep|>',
    value_end="<|close|>",
    argument_end="argument<|sep|>",
    call_end="<|close|>call<|sep|>",
    end="<|close|>tools<|sep|>",
    without=("<|open|>argument",),
    several=True,
)


@dataclass(frozen=True)
class _DSML(_TypedTagSyntax):
    """Form of the calls of DeepSeek V3.2 and V4.

    The opening tag of an argument has ``string="true"`` if the value is a string. Other values are JSON.
    """

    def _argument(self, rules: GrammarRules, tool: ToolSchema, name: str, schema: Any) -> str:
        kinds = tool.kinds(schema)
        options = []
        terminal = self._text(rules, tool, schema) if "string" in kinds else None
        if terminal is not None:
            opening = expression(self.argument, name=name, kind="true")
            options.append(f"{opening} {rules.text_until(terminal, self.value_end)}")
        if others := kinds - {"string"}:
            opening = expression(self.argument, name=name, kind="false")
            options.append(f"{opening} {json_of(tool, schema, others)} {mark(self.value_end)}")
        if not options:
            raise not_expressible(kinds, self.value_end, *self.without)
        return rules.rule(f"{choice(options)} {GAP}")

    def _read_value(self, text: str, opening: re.Match[str], tool: ToolSchema, schema: Any) -> tuple[str, int] | None:
        start = opening.end()
        end = text.find(self.value_end, start)
        value = json_text(text[start:end])
        if opening["type"] == "false":
            end = DECODER.raw_decode(text, start)[1]
            value = text[start:end]
        elif any(one in text[start:end] for one in self.without):
            return None
        return (value, end + len(self.value_end)) if text.startswith(self.value_end, end) else None


def dsml(block: str) -> TagSyntax:
    """Return the form of DeepSeek's calls as tags. ``block`` is the name of the tag around all calls."""
    return _DSML(
        mark=f"<｜DSML｜{block}>",
        call='<｜DSML｜invoke name="{name}">',
        argument='<｜DSML｜parameter name="{name}" string="{type}">',
        value_end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>",
        end=f"</｜DSML｜{block}>",
        without=("<｜DSML｜parameter",),
        several=True,
    )
