"""Errors about the JSON schemas of structured outputs in each API, and ``strict`` in every place that accepts it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from metal_engine.answers.forced_calls import forced_schema
from metal_engine.errors import ParameterError
from metal_engine.grammars.compiler import GrammarRefusedError
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.server.anthropic import protocol
from metal_engine.server.errors import APIError
from metal_engine.server.generation.sampling import sampling_params
from metal_engine.server.generation.schema_errors import with_place
from metal_engine.server.openai import responses_protocol
from metal_engine.server.protocol import ChatCompletionBody
from tests.support.serving import MODEL, Served

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]

Body = dict[str, Any]


def response_format(schema: Any) -> Body:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


# A request with a schema in each place, and the name of the place.
REQUESTS: list[tuple[str, Callable[[Any], Body], str]] = [
    (CHAT, lambda schema: {"messages": USER, **response_format(schema)}, "response_format.json_schema.schema"),
    (CHAT, lambda schema: {"messages": USER, "response_format": {"type": "json_object", "schema": schema}},
     "response_format.schema"),
    (COMPLETIONS, lambda schema: {"prompt": "a", **response_format(schema)}, "response_format.json_schema.schema"),
    (COMPLETIONS, lambda schema: {"prompt": "a", "structured_outputs": {"json": schema}}, "structured_outputs.json"),
    (COMPLETIONS, lambda schema: {"prompt": "a", "structured_outputs": {"json": json.dumps(schema)}},
     "structured_outputs.json"),
    (RESPONSES, lambda schema: {"input": "a", "text": {"format": {"type": "json_schema", "schema": schema}}},
     "text.format.schema"),
    (MESSAGES, lambda schema: {"messages": USER, "max_tokens": 10,
                               "output_config": {"format": {"type": "json_schema", "schema": schema}}},
     "output_config.format.schema"),
    ("/api/chat", lambda schema: {"messages": USER, "format": schema, "stream": False}, "format"),
]  # fmt: skip
FAULTS: list[tuple[Body, str]] = [
    ({"properties": {"a": {"type": 5}}}, ".properties.a.type must be a string or a list of strings"),
    ({"type": 5}, ".type must be a string or a list of strings"),
    ({"properties": {"a": {"type": "strnig"}}}, ".properties.a cannot be compiled: Invalid type: strnig"),
    (
        {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string", "format": "nonsense"}}},
        ".$defs.x cannot be compiled: Unknown format: nonsense",
    ),
    ({"$ref": "#/nowhere"}, " cannot be compiled: Pointer '/nowhere' does not exist"),
]


@pytest.mark.parametrize(("path", "made", "place"), REQUESTS)
def test_the_place_and_the_problem(served: Served, path: str, made: Callable[[Any], Body], place: str) -> None:
    for schema, problem in FAULTS:
        response = served.post(path, {"model": MODEL, **made(schema)})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error if isinstance(error, str) else error["message"]) == place + problem
        if isinstance(error, dict) and "param" in error:
            assert error["param"] == place.partition(".")[0]


@pytest.mark.parametrize(("path", "body", "place"), [
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
])  # fmt: skip
def test_no_schema(served: Served, path: str, body: Body, place: str) -> None:
    assert served.post(path, body).json()["error"]["message"] == f"{place} must be a JSON schema, got None"


def test_a_schema_for_a_json_object(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {"messages": USER, "max_tokens": 1, "response_format": {"type": "json_object", "schema": schema}}
    assert served.post(CHAT, body).status_code == 200
    structured = served.runner.seen_params[-1].structured_outputs
    assert structured is not None and structured.json == schema


class Compiler:
    """Refuses schemas that contain the text "bad" outside their definitions.

    Attributes:
        num_calls: number of compilations.
    """

    def __init__(self, seconds: float = 0.1) -> None:
        self.num_calls = 0
        self._seconds = seconds

    def __call__(self, params: SamplingParams) -> None:
        self.num_calls += 1
        assert params.structured_outputs is not None and isinstance(params.structured_outputs.json, dict)
        schema = {name: value for name, value in params.structured_outputs.json.items() if name != "$defs"}
        if '"bad"' in json.dumps(schema):
            raise GrammarRefusedError("is bad", self._seconds)


def placed(schema: Any, compiler: Compiler) -> ParameterError:
    structured = StructuredOutputsParams(json=schema)
    with pytest.raises(GrammarRefusedError) as info:
        compiler(SamplingParams(structured_outputs=structured))
    return with_place(info.value, structured, compiler)


BAD = {"format": "bad"}


@pytest.mark.parametrize(("schema", "place"), [
    ({"format": "bad"}, ""),
    ({"properties": {"a": {}, "b/c %": {"items": {"anyOf": [{}, BAD]}}}}, ".properties.b/c %.items.anyOf.1"),
    ({"properties": {"a": False, "b": BAD}}, ".properties.b"),
    ({"items": [True, BAD]}, ".items.1"),
    ({"properties": {"a": {"properties": {"b": BAD}, "format": "bad"}}}, ".properties.a.properties.b"),
    ({"properties": {"a": {"$id": "x", "properties": {"b": BAD}}}}, ""),
    ({"$id": "x", "$schema": "y", "properties": {"b": BAD}}, ".properties.b"),
])  # fmt: skip
def test_the_innermost_part(schema: Any, place: str) -> None:
    assert placed(schema, Compiler()).name == f"structured_outputs.json{place}"


def test_the_search_is_limited() -> None:
    compiler = Compiler()
    many = {"properties": {str(i): {} for i in range(1000)} | {"x": BAD}}
    assert placed(many, compiler).name == "structured_outputs.json"
    assert compiler.num_calls < 80
    compiler = Compiler(math.inf)
    assert placed({"properties": {"x": BAD}}, compiler).name == "structured_outputs" and compiler.num_calls == 1


def test_other_grammars_have_no_place() -> None:
    structured, error = StructuredOutputsParams(regex="("), GrammarRefusedError("is bad", 0.1)
    compiler = Compiler()
    assert with_place(error, structured, compiler) is error and compiler.num_calls == 0
    assert with_place(error, None, compiler) is error


SCHEMA = {"type": "object"}


def asked(body: ChatCompletionBody) -> StructuredOutputsParams:
    wanted = sampling_params(body, {}).structured_outputs
    assert wanted is not None and wanted.json == SCHEMA
    return wanted


@pytest.mark.parametrize("strict", [True, False, None])
def test_formats(strict: bool | None) -> None:
    more = {} if strict is None else {"strict": strict}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}
    assert asked(ChatCompletionBody(messages=USER, response_format=shape)).strict is bool(strict)
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, **more}}
    chat, _ = responses_protocol.to_chat(responses_protocol.ResponsesBody(input="hi", text=text), [])
    assert asked(chat).strict is bool(strict)
    assert asked(ChatCompletionBody(messages=USER, structured_outputs={"json": SCHEMA, **more})).strict is bool(strict)


def test_a_non_boolean_strict_in_structured_outputs_is_an_error() -> None:
    with pytest.raises(APIError, match=r"structured_outputs\.strict must be true or false"):
        asked(ChatCompletionBody(messages=USER, structured_outputs={"json": SCHEMA, "strict": "yes"}))


def test_tools() -> None:
    """Each tool has its own setting, also in /v1/responses and /v1/messages."""
    given: Any = [
        {"type": "function", "name": name, "parameters": {"properties": {"x": SCHEMA}}, "strict": strict}
        for name, strict in (("one", True), ("two", False))
    ]
    chat, _ = responses_protocol.to_chat(responses_protocol.ResponsesBody(input="hi", tools=given), [])
    tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or ()]
    inputs: Any = [{"name": one["name"], "input_schema": one["parameters"], "strict": one["strict"]} for one in given]
    message = protocol.to_chat(protocol.MessagesBody(model="m", max_tokens=1, messages=USER, tools=inputs))
    assert message.tools == chat.tools
    one, two = forced_schema(tools, None, parallel=True)["$defs"].values()
    assert one["properties"]["x"] == {**SCHEMA, "additionalProperties": False} and one["additionalProperties"] is False
    assert two["properties"]["x"] == SCHEMA
    assert forced_schema(tools, "one", parallel=True) == one


def test_a_strict_tool_that_is_too_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"items": schema}
    tool = {"function": {"name": "f", "strict": True, "parameters": {"properties": {"x": schema}}}}
    with pytest.raises(ParameterError, match="nested too deeply"):
        forced_schema([tool], "f", parallel=True)
