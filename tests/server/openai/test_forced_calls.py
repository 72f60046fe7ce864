"""`tool_choice` required, or naming a function, with a real grammar: the response contains calls that validate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from jsonschema import Draft202012Validator

from metal_engine.answers.forced_calls import forced_schema
from tests.server.openai.test_tools import USER, streamed
from tests.server.test_errors import check_error
from tests.support.json_schemas import SCHEMAS
from tests.support.serving import MODEL, Served, serve
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import in_thread

CHAT = "/v1/chat/completions"


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def of_type(kind: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with one property, whose definition has the same name in all schemas."""
    return {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/T"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"T": kind},
    }


LIST = {
    "type": "object",
    "properties": {"value": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
TOOLS = [
    tool("is_bool", of_type({"type": "boolean"})),
    tool("is_ab", of_type({"enum": ["a", "b"]})),
    tool("is_list", LIST),
    tool("says \"what\" 'it' is\\", {"properties": {"$ref": {"const": {"$ref": "#"}}}, "required": ["$ref"],
                                     "additionalProperties": False}),
    tool("takes_nothing", {"type": "object", "additionalProperties": False}),
]  # fmt: skip
NAMES = [t["function"]["name"] for t in TOOLS]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    """Yield a server on a model with random weights, which generates anything the grammar allows.

    Its template has no tools.
    """
    core = tiny_engine(max_model_len=8192, num_blocks=8192, max_num_batched_tokens=2048, max_num_seqs=32)
    with serve(engine=in_thread(lambda: core)) as served:
        yield served


def check_calls(calls: list[tuple[str, str]], tools: list[dict[str, Any]]) -> None:
    schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
    for name, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        Draft202012Validator(schemas[name]).validate(value)


def test_required(tiny: Served) -> None:
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "n": 12, "seed": 1}
    called = set()
    num_complete = 0
    for choice in tiny.post(CHAT, {**body, "temperature": 1.5}).json()["choices"]:
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
        assert choice["message"]["content"] is None and calls
        complete = choice["finish_reason"] == "tool_calls"
        assert complete or choice["finish_reason"] == "length"
        num_complete += complete
        check_calls(calls if complete else calls[:-1], TOOLS)
        called |= {name for name, _ in calls}
    assert num_complete >= 4
    assert {"is_bool", "is_ab", "is_list"} <= called


@pytest.mark.parametrize("name", NAMES)
def test_named(tiny: Served, name: str) -> None:
    body = {"messages": USER, "tools": TOOLS, "tool_choice": named(name), "max_tokens": 120, "n": 4, "seed": 1}
    num_complete = 0
    for choice in tiny.post(CHAT, body).json()["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name
        if choice["finish_reason"] == "stop":
            num_complete += 1
            check_calls([(name, call["function"]["arguments"])], TOOLS)
    assert num_complete >= 2


@pytest.mark.parametrize("parallel", [False, True])
def test_streamed_forced_calls_equal_unstreamed_forced_calls(tiny: Served, parallel: bool) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150, "seed": 0}
    body["parallel_tool_calls"] = parallel
    (choice,) = tiny.post(CHAT, {"messages": USER, **body}).json()["choices"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in choice["message"]["tool_calls"]]
    assert parallel or len(calls) == 1
    message, reason = streamed(tiny, **body)
    assert (message["calls"], message["content"], reason) == (calls, "", choice["finish_reason"])


OBJECTS = [schema for schema in SCHEMAS if schema.get("type") == "object"]


@pytest.mark.parametrize("step", [80, pytest.param(1, marks=pytest.mark.full)])
def test_schemas_of_many_kinds(tiny: Served, step: int) -> None:
    schemas = OBJECTS[::step]
    num_complete = 0
    for i, schema in enumerate(schemas):
        tools = [tool("first", schema), tool("second", schemas[i - 1])]
        body = {"messages": USER, "tools": tools, "max_tokens": 300, "n": 3, "seed": i}
        for choice in ("required", named("first")):
            for answer in tiny.post(CHAT, {**body, "tool_choice": choice, "parallel_tool_calls": False}).json()[
                "choices"
            ]:
                if answer["finish_reason"] == "length":
                    continue
                (call,) = answer["message"]["tool_calls"]
                check_calls([(call["function"]["name"], call["function"]["arguments"])], tools)
                num_complete += 1
    assert num_complete >= 3 * len(schemas)


def test_tools_that_cannot_be_forced_get_a_400(tiny: Served) -> None:
    for tools, more, param in [
        ([tool("f", {"type": "string"})], {}, "tools"),
        ([tool("f", {"type": "object", "properties": {"x": {"type": "foo"}}})], {}, "tools"),
        ([tool("f", {"$ref": "#/nowhere"})], {}, "tools"),
        (TOOLS, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ]:
        for choice in ("required", named(tools[0]["function"]["name"])):
            check_error(tiny.post(CHAT, {"messages": USER, "tools": tools, "tool_choice": choice, **more}), 400, param)


def test_messages_that_are_cut_off_within_a_call(tiny: Served) -> None:
    """A whole response has as much of the call's input as the official client builds from the stream."""
    client = anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "f", "input_schema": OBJECTS[0]}]
    for max_tokens in (1, 2, 3, 9, 30):
        body: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "messages": USER, "tools": tools}
        body |= {"tool_choice": {"type": "tool", "name": "f"}, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            in_stream = stream.get_final_message()
        assert whole.stop_reason == in_stream.stop_reason == "max_tokens"
        (block,), (other,) = whole.content, in_stream.content
        assert block.type == other.type == "tool_use"
        assert isinstance(block.input, dict) and block.input == other.input


def test_references_move_with_their_schema() -> None:
    schema = forced_schema(TOOLS, None, parallel=True)
    assert schema["$defs"]["0"]["properties"]["x"] == {"$ref": "#/$defs/0/$defs/T"}
    assert schema["$defs"]["2"]["properties"]["next"]["anyOf"][0] == {"$ref": "#/$defs/2"}
    # These only look like references: the name of a property, and data.
    assert schema["$defs"]["3"]["properties"]["$ref"] == {"const": {"$ref": "#"}}


@pytest.mark.parametrize("name", ["default", "enum", "const", "examples", "$ref", "properties"])
def test_a_property_may_be_called_like_a_keyword(name: str) -> None:
    own = {"properties": {name: {"$ref": "#/$defs/T"}}, "$defs": {"T": {"type": "integer"}}}
    schema = forced_schema([tool("f", own)], None, parallel=True)
    assert schema["$defs"]["0"]["properties"][name] == {"$ref": "#/$defs/0/$defs/T"}
