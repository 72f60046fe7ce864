"""Phases of answers: triggers of tool calls in each format, reasoning, and bad tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.forced_calls import forced_schema
from metal_engine.answers.format_phases import _CACHE, _MAX_CACHED, _size, call_phase, call_text, reasoning_phase
from metal_engine.answers.harmony import harmony_format
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.answers.tool_prompts import prompted_format
from metal_engine.errors import ParameterError
from metal_engine.grammars.marks import without_marks
from metal_engine.json_schemas.closed import closed
from metal_engine.output_phases import ReasoningPhase
from tests.support.call_walks import accepts, vocabulary
from tests.support.splitting import answer_format, run
from tests.support.tool_formats import TOOLS


def tool(parameters: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def allows(name: str, tools: list[dict[str, Any]], text: str, *, parallel: bool = True) -> bool:
    phase = call_phase(answer_format(name), tools, parallel=parallel)
    assert phase is not None
    return accepts(vocabulary("plain"), phase.triggers[0], text)


def test_triggers() -> None:
    phase = call_phase(answer_format("qwen3_coder"), TOOLS, parallel=False)
    marks = [trigger.mark for trigger in phase.triggers]
    assert marks == ["<tool_call>", "<function="] and not phase.parallel
    phase = call_phase(harmony_format(), TOOLS, parallel=True)
    marks = [(trigger.mark, trigger.is_whole) for trigger in phase.triggers]
    assert marks == [
        ("<|channel|>commentary to=", False),
        ("<|channel|>analysis to=", False),
        ("<|start|>assistant to=", False),
        ("to=", True),
    ]
    assert phase.parallel
    phase = call_phase(answer_format("pythonic"), TOOLS, parallel=True)
    marked, bare = phase.triggers
    assert (marked.mark, marked.heads, marked.is_whole) == ("<|tool_call_start|>", (), False)
    assert (bare.mark, bare.is_whole) == ("[", True)
    assert [head for head, _ in bare.heads] == ["get_weather(", "find_trains("]


def test_formats_without_grammar() -> None:
    assert call_phase(AnswerFormat(), TOOLS, parallel=True) is None
    assert call_phase(answer_format("none"), TOOLS, parallel=True) is None
    assert call_phase(answer_format("json_tools"), [], parallel=True) is None


def test_described_tools_have_a_grammar() -> None:
    assert call_phase(prompted_format(AnswerFormat()), TOOLS, parallel=True).triggers[0].mark == "<tool_call>"


LIST = '[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'
PYTHON = "[f(), f()]<|tool_call_end|>"


@pytest.mark.parametrize(("name", "text"), [("mistral", LIST), ("pythonic", PYTHON)])
def test_one_call_in_a_block_without_parallel_calls(name: str, text: str) -> None:
    assert allows(name, [tool(None)], text)
    assert not allows(name, [tool(None)], text, parallel=False)


@pytest.mark.parametrize(("parameters", "argument", "is_allowed"), [
    (None, "", True),
    ({}, "x=1", False),
    ({"type": "object", "properties": {}}, "x=1", False),
    ({"type": "object"}, "x=1", True),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "x=1", True),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, "a=1, a=2", False),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "", False),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "a=1", True),
    ({"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"a": {"enum": ["b@c"]}}}}}, 'a="b@c"', True),
    ({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}}}, "a=None", True),
])  # fmt: skip
def test_arguments(parameters: Any, argument: str, is_allowed: bool) -> None:
    assert allows("pythonic", [tool(parameters)], f"[f({argument})]<|tool_call_end|>") == is_allowed
    if argument and "," not in argument:
        key, value = argument.split("=")
        value = value.strip('"')
        text = f"<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert allows("qwen3_coder", [tool(parameters)], text) == is_allowed
        quoted = value if value in ("1", "null") else f"<escape>{value}<escape>"
        text = f"call:f{{{key}:{'null' if value == 'None' else quoted}}}<end_function_call>"
        assert allows("function_gemma", [tool(parameters)], text) == is_allowed


@pytest.mark.parametrize(("arguments", "closed_by"), [
    ({"a": {"b": 1}}, [True]),
    ({"c": {"d": 1}}, []),
    ({"c": {"d": 1, "x": 1}}, [True, None]),
    ({"x": 1}, [True, None]),
    ({"c": {"d": "text"}}, [True, None, False]),
], ids=str)  # fmt: skip
def test_strict_tools_are_closed(arguments: dict[str, Any], closed_by: list[bool | None]) -> None:
    """Other tools are closed as far as their objects name properties. Tools with ``strict: false`` are open."""
    named = {"type": "object", "properties": {"d": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object"}, "c": {"$ref": "#/$defs/c"}},
        "$defs": {"c": named},
    }
    for strict in (False, True, None):
        tools = [tool(schema, strict=strict), tool(schema, "g")]
        text = json.dumps({"name": "f", "arguments": arguments}) + "</tool_call>"
        assert allows("json_tools", tools, text) == (strict not in closed_by)
        forced = closed(forced_schema(tools, None, parallel=True))
        calls = [{"name": "f", "parameters": arguments}]
        assert Draft202012Validator(forced).is_valid(calls) == (strict not in closed_by)


@pytest.mark.parametrize(("parser", "text", "value"), [
    ("qwen3_coder", "\n<function=f>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>", "3"),
    ("qwen3_coder", "\n<function=f>\n<parameter=x>\n[3]\n</parameter>\n</function>\n</tool_call>", [3]),
    ("glm47", "f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", 3),
    ("glm47", "f\n<arg_key>x</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>", "a b"),
    ("pythonic", "[f(x=3)]<|tool_call_end|>", 3),
    ("gemma4", 'call:f{x:<|"|>3<|"|>}<tool_call|>', "3"),
])  # fmt: skip
def test_arguments_that_an_open_tool_does_not_name(parser: str, text: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for strict in (False, None):
        tools = [tool(schema, strict=strict)]
        assert allows(parser, tools, text) == (strict is False)
        known = answer_format(parser)
        assert known.tool is not None
        _, _, calls, _ = run(MarkSplitter(known, tools), list(known.tool.tool_call_start + text))
        assert strict is None or calls == [("f", {"x": value})]


@pytest.mark.parametrize("name", ["a b", "a<b", "a\nb", 'a"b'])
def test_names_that_a_format_cannot_express(name: str) -> None:
    for parser in ("qwen3_coder", "glm47", "minimax_m2", "kimi_k3", "pythonic"):
        assert call_phase(answer_format(parser), [tool(None, name)], parallel=True) is None
        optional = tool({"type": "object", "properties": {name: {"type": "string"}}})
        assert call_phase(answer_format(parser), [optional], parallel=True) is not None
        required = tool({"type": "object", "properties": {name: {"type": "string"}}, "required": [name]})
        assert call_phase(answer_format(parser), [required], parallel=True) is None
    assert call_phase(answer_format("json_tools"), [tool(None, name)], parallel=True) is not None


@pytest.mark.parametrize("parser", ["json_tools", "qwen3_coder", "pythonic", "gemma4"])
def test_parameters_that_are_not_an_object(parser: str) -> None:
    with pytest.raises(ParameterError) as caught:
        call_phase(answer_format(parser), [TOOLS[0], tool({"type": "string"})], parallel=True)
    assert caught.value.name == "tools[1].function.parameters"


def test_reasoning() -> None:
    options: dict[str, Any] = {"is_structured": False, "budget": 7}
    assert reasoning_phase(AnswerFormat(), begins_inside=False, **options) is None
    phase = reasoning_phase(answer_format("json_tools"), begins_inside=True, **options)
    assert phase == ReasoningPhase("<think>", "</think>", True, 7)
    phase = reasoning_phase(harmony_format(), begins_inside=False, **options)
    assert phase == ReasoningPhase("<|channel|>analysis<|message|>", "<|end|>", False, 7)
    phase = reasoning_phase(harmony_format(), begins_inside=False, is_structured=True, budget=None)
    assert (phase.end, phase.begins_inside) == ("<|end|>", False)
    assert (phase.next_message, phase.content_start) == ("<|start|>assistant", "<|channel|>final<|message|>")


def test_the_text_of_calls() -> None:
    """A mark within a string does not end a call."""
    text = call_text(answer_format("json_tools"), TOOLS)
    assert text.starts == ("<tool_call>",) and text.end is not None
    body = '{"name": "f", "arguments": {"a": "</tool_call>"}}'
    assert text.end().find(f"{body}</tool_call>") == (len(body), "</tool_call>")
    bare = call_text(answer_format("qwen3_coder"), TOOLS)
    assert "<function=find_trains>" in bare.starts
    body = "<function=find_trains><parameter=city></tool_call></parameter></function>"
    assert bare.end is not None and bare.end().find(f"{body}</tool_call>") == (len(body), "</tool_call>")
    assert call_text(answer_format("mistral"), TOOLS).end is None
    first = call_text(answer_format("llama3_json"), TOOLS)
    assert first.starts == ("<|python_tag|>",) and '{"name": "find_trains"' in first.first_starts


def test_equal_tools_share_a_phase() -> None:
    known, other = answer_format("json_tools"), answer_format("qwen3_coder")
    first = call_phase(known, TOOLS, parallel=True)
    assert first is call_phase(known, json.loads(json.dumps(TOOLS)), parallel=True)
    described = [{"type": "function", "function": {**one["function"], "description": "Other."}} for one in TOOLS]
    assert call_phase(known, described, parallel=True) is first
    reordered = tool({"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}})
    ordered = tool({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    different = [
        call_phase(known, TOOLS, parallel=False), call_phase(known, TOOLS[:1], parallel=True),
        call_phase(other, TOOLS, parallel=True), call_phase(other, [ordered], parallel=True),
        call_phase(other, [reordered], parallel=True), call_phase(other, [tool(None)], parallel=True),
        call_phase(other, [tool(None, strict=True)], parallel=True),
    ]  # fmt: skip
    assert len({id(one) for one in [first, *different]}) == 8


def test_the_cache_is_bounded() -> None:
    text = "x" * 90_000
    schemas = [{"type": "object", "properties": {"a": {"description": f"{i}{text}"}}} for i in range(60)]
    first = call_phase(answer_format("json_tools"), [tool(schemas[0])], parallel=True)
    for schema in schemas:
        call_phase(answer_format("json_tools"), [tool(schema)], parallel=True)
    assert call_phase(answer_format("json_tools"), [tool(schemas[0])], parallel=True) is not first
    assert sum(map(_size, _CACHE._phases.values())) == _CACHE._num_characters <= _MAX_CACHED


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm47", "gemma4", "kimi_k3"])
def test_values_that_a_format_cannot_express(parser: str) -> None:
    """Only the arguments of that tool are open."""
    bad = tool({"type": "object", "properties": {"a": {"type": "any"}}, "required": ["a"]}, "bad")
    good = tool({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, "good")
    phase = call_phase(answer_format(parser), [bad, good], parallel=True)
    assert phase is not None
    assert [one.tool for one in phase.triggers[0].arguments] == ["good"]


def test_marks_become_tokens_and_strings() -> None:
    assert without_marks('call: @"<a>x<b>" r1\nr1[suffix=@"<a>"]: T\nr2[suffix=@"y"]: T\nT: /a*/\n', {"<a>": 5}) == (
        'call: (<[5]> "x<b>") r1\nr1: R1_TEXT (<[5]>)\nR1_TEXT: R1_ALL & ~R1_END\nR1_ALL: T\n'
        'R1_END: /(?s:.*)<a>(?s:.*)/\nr2[suffix="y"]: T\nT: /a*/\n'
    )


def test_a_text_up_to_a_mark_with_a_special_token_within() -> None:
    assert without_marks('r1[suffix=@"</D>"]: T\nT: /a*/\n', {"D": 5}) == (
        'r1: R1_TEXT (<[5]> ">")\nR1_TEXT: (R1_ALL & ~R1_END) "</"\n'
        "R1_ALL: T\nR1_END: /(?s:.*)<\\/D>(?s:.*)/\nT: /a*/\n"
    )


@pytest.mark.parametrize("parser", ["json_tools", "qwen3_coder", "pythonic", "gemma4", "kimi_k3"])
@pytest.mark.parametrize("schema", [
    {"type": 5}, {"type": ["object", {}]}, {"properties": []}, {"properties": {"a": 5}},
    {"properties": {"a": {"type": {}}}}, {"properties": {"a": {"enum": "x"}}}, {"properties": {"a": {"enum": []}}},
    {"properties": {"a": {"type": "string", "minLength": "x", "maxLength": -1, "pattern": "("}}},
    {"properties": {"a": {"type": "array", "minItems": "x", "maxItems": {}, "items": 5, "prefixItems": 5}}},
    {"properties": {"a": {"anyOf": 5, "allOf": [5], "oneOf": {}}}}, {"required": 5}, {"additionalProperties": 5},
    {"properties": {"a": {"$ref": 5}}}, {"properties": {"a": {"$ref": "#/nowhere"}}}, {"$ref": "#"},
    {"properties": {"a": {"$ref": "#/properties/a"}}}, {"properties": {"a": {"type": "integer", "minimum": "x"}}},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 3}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
    {"properties": {"a": {"type": "number", "multipleOf": 0}}, "required": ["a", 5]},
], ids=str)  # fmt: skip
def test_bad_schemas(parser: str, schema: Any) -> None:
    """Building a grammar and reading a call survive schemas of any shape. The grammar may be refused later."""
    tools = [tool(schema)]
    try:
        call_phase(answer_format(parser), tools, parallel=True)
    except ParameterError as error:
        assert error.name.startswith("tools")
    texts = {"qwen3_coder": "<function=f><parameter=a>[1]</parameter></function></tool_call>"}
    text = answer_format(parser).tool.tool_call_start + texts.get(parser, '{"name": "f", "arguments": {"a": 1}}')
    run(MarkSplitter(answer_format(parser), tools), list(text))
