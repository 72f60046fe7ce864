"""Calls whose arguments are one JSON object: Hermes and Qwen, Llama 3, Mistral, Kimi K2, DeepSeek, gpt-oss."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metal_engine.answers.call_syntaxes.lark import GAP, GrammarRules, json_value, mark, string
from metal_engine.answers.call_syntaxes.syntax import JSON_QUOTES, Quotes, checked_name, choice
from metal_engine.answers.call_syntaxes.tool_schemas import ToolSchema
from metal_engine.answers.call_syntaxes.values import DECODER
from metal_engine.output_phases import CallTrigger

_SPACE = r"[ \t\r\n]*"
_WORD = re.compile(r"[\w.-]{1,256}")
_RECIPIENT = re.compile(r"[^\s<>:@]{1,256}")


def _object(rules: GrammarRules, tool: ToolSchema) -> str:
    """Return the name of a rule for the arguments of a tool."""
    return rules.arguments(tool, lambda one: json_value(one.schema, strict=one.is_strict))


@dataclass(frozen=True)
class JSONSyntax:
    """Exact form of calls with JSON arguments.

    Implements :class:`metal_engine.answers.call_syntaxes.syntax.CallSyntax`.

    Attributes:
        marks: pairs of a mark that begins calls, and a function ``(rules, tools, parallel)`` that returns the
            definition of the rule ``call`` for this mark. ``parallel`` is True if the mark may begin several calls.
        head: pattern for the start of each call, with the groups ``name`` and, optionally, ``id``.
        tail: pattern for the text after the arguments of a call.
        end: pattern for the text after the last call.
        whole: marks that begin a call only if the call is the whole content.
    """

    marks: tuple[tuple[str, Callable[[GrammarRules, Sequence[ToolSchema], bool], str]], ...]
    head: re.Pattern[str]
    tail: re.Pattern[str]
    end: re.Pattern[str]
    whole: tuple[str, ...] = ()

    def quotes(self, tools: Sequence[ToolSchema]) -> Quotes:
        return JSON_QUOTES

    def triggers(self, tools: Sequence[ToolSchema], *, parallel: bool) -> tuple[CallTrigger, ...]:
        triggers = []
        for text, call in self.marks:
            rules = GrammarRules()
            triggers.append(rules.trigger(text, call(rules, tools, parallel), is_whole=text in self.whole))
        return tuple(triggers)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        names = {tool.name for tool in tools}
        calls: list[dict[str, Any]] = []
        at = 0
        while (head := self.head.match(text, at)) is not None and head["name"] in names:
            value, end = DECODER.raw_decode(text, head.end())
            tail = self.tail.match(text, end)
            if not isinstance(value, dict) or tail is None:
                return None
            calls.append({"name": head["name"], "arguments": text[head.end() : end], "id": head.groupdict().get("id")})
            at = tail.end()
        return calls if self.end.fullmatch(text, at) else None


def json_call(rules: GrammarRules, tools: Sequence[ToolSchema]) -> str:
    """Return a Lark expression for a call that is a JSON object with ``name`` and ``arguments``."""
    options = [
        f"{string(json.dumps(tool.name, ensure_ascii=False))} {GAP} "
        f'"," {GAP} "\\"arguments\\"" {GAP} ":" {GAP} {_object(rules, tool)}'
        for tool in tools
    ]
    one = choice([rules.rule(option) for option in options])
    return f'{GAP} "{{" {GAP} "\\"name\\"" {GAP} ":" {GAP} {one} {GAP} "}}" {GAP}'


def _hermes(rules: GrammarRules, tools: Sequence[ToolSchema], parallel: bool) -> str:
    return f"{json_call(rules, tools)} {mark('</tool_call>')}"


HERMES = JSONSyntax(
    (("<tool_call>", _hermes),),
    re.compile(
        rf'{_SPACE}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"(?P<name>[^"\\]{{1,256}})"{_SPACE},{_SPACE}"arguments"'
        rf"{_SPACE}:{_SPACE}(?=\{{)"
    ),
    re.compile(rf"{_SPACE}\}}{_SPACE}"),
    re.compile(""),
)


class Llama3Syntax(JSONSyntax):
    """Form of Llama 3's calls: one JSON object after a mark, or as the whole content."""

    def triggers(self, tools: Sequence[ToolSchema], *, parallel: bool) -> tuple[CallTrigger, ...]:
        rules = GrammarRules()
        heads = []
        for tool in tools:
            arguments = f'{GAP} "," {GAP} "\\"parameters\\"" {GAP} ":" {GAP} {_object(rules, tool)} {GAP} "}}"'
            heads.append((f'{checked_name(_WORD, tool.name)}"', rules.rule(arguments)))
        one = rules.rule(choice([rules.rule(f"{string(head)} {arguments}") for head, arguments in heads]))
        opening = f'{GAP} "{{" {GAP} "\\"name\\"" {GAP} ":" {GAP} "\\""'
        return (
            rules.trigger("<|python_tag|>", f"{opening} {one}"),
            rules.trigger('{"name": "', one, tuple(heads), is_whole=True),
        )


LLAMA3 = Llama3Syntax(
    (),
    re.compile(
        rf'{_SPACE}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"(?P<name>{_WORD.pattern})"{_SPACE},{_SPACE}"parameters"'
        rf"{_SPACE}:{_SPACE}(?=\{{)"
    ),
    re.compile(rf"{_SPACE}\}}"),
    re.compile(_SPACE),
)


def _mistral(rules: GrammarRules, tools: Sequence[ToolSchema], parallel: bool) -> str:
    headed, listed = [], []
    for tool in tools:
        arguments = _object(rules, tool)
        call_id = f"({mark('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?"
        headed.append(f"{string(checked_name(_WORD, tool.name))} {call_id} {mark('[ARGS]')}? {arguments}")
        name = string(f'"{tool.name}"')
        listed.append(f'{name} {GAP} "," {GAP} "\\"arguments\\"" {GAP} ":" {GAP} {arguments}')
    listed_id = rules.rule(f'{GAP} "," {GAP} "\\"id\\"" {GAP} ":" {GAP} /"[A-Za-z0-9]{{9}}"/')
    one = rules.rule(
        f'"{{" {GAP} "\\"name\\"" {GAP} ":" {GAP} {choice([rules.rule(one) for one in listed])} {listed_id}? {GAP} "}}"'
    )
    more = f'({GAP} "," {GAP} {one})*' if parallel else ""
    several = rules.rule(f'"[" {GAP} {one} {more} {GAP} "]"')
    return f"{GAP} ({choice([rules.rule(one) for one in headed])} | {several})"


_ITEM = re.compile(
    rf'{_SPACE}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"(?P<name>{_WORD.pattern})"{_SPACE},{_SPACE}"arguments"{_SPACE}:{_SPACE}'
    r"(?=\{)"
)
_ITEM_END = re.compile(
    rf'{_SPACE}(?:,{_SPACE}"id"{_SPACE}:{_SPACE}"(?P<id>[A-Za-z0-9]{{9}})"{_SPACE})?\}}{_SPACE}(?:,|(?=\]))'
)


class MistralSyntax(JSONSyntax):
    """Form of Mistral's calls: a name, an optional id and arguments; or a list of objects."""

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        text = text.strip()
        if not text.startswith("["):
            return super().read(text, tools)
        names = {tool.name for tool in tools}
        calls: list[dict[str, Any]] = []
        at = 1
        while (head := _ITEM.match(text, at)) is not None and head["name"] in names:
            end = DECODER.raw_decode(text, head.end())[1]
            tail = _ITEM_END.match(text, end)
            if tail is None:
                return None
            calls.append({"name": head["name"], "arguments": text[head.end() : end], "id": tail["id"]})
            at = tail.end()
        return calls if calls and text[at:] == "]" else None


MISTRAL = MistralSyntax(
    (("[TOOL_CALLS]", _mistral),),
    re.compile(rf"{_SPACE}(?P<name>{_WORD.pattern})(?:\[CALL_ID\](?P<id>[A-Za-z0-9]{{9}}))?(?:\[ARGS\])?(?=\{{)"),
    re.compile(""),
    re.compile(""),
)


def _kimi_k2(rules: GrammarRules, tools: Sequence[ToolSchema], parallel: bool) -> str:
    begin, end = mark("<|tool_call_begin|>"), mark("<|tool_call_end|>")
    calls = [
        f"{string(checked_name(_RECIPIENT, tool.name))} /:[0-9]{{1,3}}/ {GAP} {mark('<|tool_call_argument_begin|>')} "
        f"{GAP} {_object(rules, tool)} {GAP}"
        for tool in tools
    ]
    one = rules.rule(f'{begin} "functions."? {choice([rules.rule(call) for call in calls])} {end}')
    return f"{one}{'+' if parallel else ''} {mark('<|tool_calls_section_end|>')}"


KIMI_K2 = JSONSyntax(
    (("<|tool_calls_section_begin|>", _kimi_k2),),
    re.compile(
        rf"<\|tool_call_begin\|>(?P<id>(?:functions\.)?(?P<name>{_RECIPIENT.pattern}):\d{{1,3}}){_SPACE}"
        rf"<\|tool_call_argument_begin\|>{_SPACE}(?=\{{)"
    ),
    re.compile(rf"{_SPACE}(?:<\|tool_call_end\|>|(?=<\|tool_call_begin\|>)|\Z)"),
    re.compile(""),
)


def _deepseek(before: str, after: str, closing: str) -> JSONSyntax:
    """Return the form of DeepSeek's calls.

    Args:
        before: text between the mark that begins a call and the tool's name.
        after: text between the name and the arguments.
        closing: text between the arguments and the mark that ends the call.
    """
    begin, end = f"<｜tool▁call▁begin｜>{before}", f"{closing}<｜tool▁call▁end｜>"

    def several(rules: GrammarRules, tools: Sequence[ToolSchema], parallel: bool) -> str:
        calls = [
            f"{string(checked_name(_RECIPIENT, tool.name))} {mark(after)} {_object(rules, tool)}" for tool in tools
        ]
        one = rules.rule(f"{mark(begin)} {choice([rules.rule(call) for call in calls])} {mark(end)} {GAP}")
        return f"{GAP} {one}{'+' if parallel else ''} {mark('<｜tool▁calls▁end｜>')}"

    head = rf"{_SPACE}{re.escape(begin)}(?P<name>{_RECIPIENT.pattern}){re.escape(after)}(?=\{{)"
    marks = (("<｜tool▁calls▁begin｜>", several),)
    return JSONSyntax(marks, re.compile(head), re.compile(re.escape(end)), re.compile(_SPACE))


DEEPSEEK_V3 = _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```")
DEEPSEEK_V31 = _deepseek("", "<｜tool▁sep｜>", "")


def _harmony_call(rules: GrammarRules, tools: Sequence[ToolSchema], header: str) -> str:
    """Return the definition of the rule ``call`` for gpt-oss. The rule begins with the recipient, ``functions.NAME``.

    Args:
        header: Lark expression for the part of the message's header between the recipient and the content type; empty
            if there is none.
    """
    kind = f'(" "? {mark("<|constrain|>")} "json" | " json")?'
    calls = [
        f"{string(checked_name(_RECIPIENT, tool.name))} {header} {kind} {mark('<|message|>')} {_object(rules, tool)}"
        for tool in tools
    ]
    return f'"functions." {choice([rules.rule(call) for call in calls])} {mark("<|call|>")}'


def _to_recipient(rules: GrammarRules, tools: Sequence[ToolSchema], parallel: bool) -> str:
    return _harmony_call(rules, tools, "")


def _from_assistant(rules: GrammarRules, tools: Sequence[ToolSchema], parallel: bool) -> str:
    return _harmony_call(rules, tools, f'{mark("<|channel|>")} ("commentary" | "analysis")')


# :class:`metal_engine.answers.harmony.HarmonySplitter` converts all forms to the first form. The last form follows a
# prompt that ends with ``<|start|>assistant``.
HARMONY = JSONSyntax(
    (
        ("<|channel|>commentary to=", _to_recipient),
        ("<|channel|>analysis to=", _to_recipient),
        ("<|start|>assistant to=", _from_assistant),
        ("to=", _from_assistant),
    ),
    re.compile(rf"(?:functions\.)?(?P<name>{_RECIPIENT.pattern})<\|message\|>(?=\{{)"),
    re.compile(""),
    re.compile(""),
    ("to=",),
)
