"""`--tool-grammar`: the rules of calls that reach the engine, and the errors about tools' schemas."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.output_phases import OutputPhases
from metal_engine.settings.server_args import TOOL_GRAMMARS, ServerArgs
from tests.server.test_errors import check_error
from tests.support.calling import CLAUDE_TOOLS, FLAT_TOOLS, RECORD, USER, answering
from tests.support.serving import MODEL, Served
from tests.support.tool_formats import TOOLS
from tools.fixtures.fake_engine import fake_config

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# The same request in each API.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "tools": TOOLS},
    RESPONSES: {"input": "hi", "tools": FLAT_TOOLS},
    MESSAGES: {"messages": USER, "max_tokens": 300, "tools": CLAUDE_TOOLS},
    "/api/chat": {"messages": USER, "tools": TOOLS, "stream": False},
}
REQUIRED: dict[str, Any] = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}


def sent(served: Served, path: str, **more: Any) -> OutputPhases | None:
    """Send a request. Return the phases that reach the engine."""
    response = served.post(path, {"model": MODEL, **BODIES[path], **more})
    assert response.status_code == 200, response.text
    return served.runner.seen_params[-1].phases


def serving(tool_grammar: str = "auto", text: str = RECORD.text, **options: Any) -> Any:
    return answering(text, args=ServerArgs(shutdown_timeout=1, tool_grammar=tool_grammar), **options)


@pytest.mark.parametrize("tool_grammar", TOOL_GRAMMARS)
def test_calls_that_the_model_begins(tool_grammar: str) -> None:
    with serving(tool_grammar) as served:
        for path in BODIES:
            phases = sent(served, path)
            assert (phases is not None) == (tool_grammar == "auto")
            if phases is not None:
                assert phases.calls is not None and phases.reasoning is not None and phases.calls.parallel
                assert [trigger.mark for trigger in phases.calls.triggers] == ["<tool_call>"]
        for more in ({"bad_words": ["zzz"]}, {"tool_choice": "none"}, {"allowed_token_ids": list(range(266))}):
            assert sent(served, CHAT, **more) is None
        phases = sent(served, CHAT, parallel_tool_calls=False)
        assert phases is None or (phases.calls is not None and not phases.calls.parallel)


@pytest.mark.parametrize("tool_grammar", TOOL_GRAMMARS)
def test_required_calls(tool_grammar: str) -> None:
    """Without a grammar, the prompt asks for a call, and the model writes the call in its own format."""
    calls = '[{"name": "find_trains", "parameters": {"city": "Rome"}}]'
    is_forced = tool_grammar != "never"
    with serving(tool_grammar, calls if is_forced else RECORD.text) as served:
        for path, choice in REQUIRED.items():
            sent(served, path, tool_choice=choice)
            params = served.runner.seen_params[-1]
            assert (params.structured_outputs is not None) == is_forced
            assert is_forced or params.phases is None
        body = {**BODIES[CHAT], "tool_choice": "required", "response_format": {"type": "json_object"}}
        (choice,) = served.post(CHAT, body).json()["choices"]
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert names == (["find_trains"] if is_forced else [name for name, _ in RECORD.calls])
        assert choice["finish_reason"] == "tool_calls"
        prompt = served.tokenizer.decode(served.post("/tokenize", body).json()["tokens"])
        assert ("Answer with a function call." in prompt) == (not is_forced)


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_errors_name_the_tool(calling: Served) -> None:
    """The schema of the third tool cannot be compiled."""
    good = {"type": "object", "properties": {"x": {"type": "integer"}}}
    bad = {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}}
    tools = [tool(f"f{i}", bad if i == 2 else good) for i in range(5)]
    for choice in ("required", {"type": "function", "function": {"name": "f2"}}):
        response = calling.post(CHAT, {"messages": USER, "tools": tools, "tool_choice": choice})
        assert check_error(response, 400, "tools")["message"].startswith("tools[2].function.parameters")
    inputs = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in tools]
    body = {**BODIES[MESSAGES], "model": MODEL, "tools": inputs, "tool_choice": {"type": "any"}}
    response = calling.post(MESSAGES, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("tools[2].input_schema")


def test_many_schemas_that_cannot_be_compiled() -> None:
    """Other requests are answered while the schemas are checked in the background."""
    config = fake_config(max_model_len=1 << 16, num_blocks=8192, max_num_batched_tokens=8192)
    schemas = ({"type": "object", "properties": {"a": {"$ref": f"#/{i}"}}} for i in range(200))
    tools = [tool(f"f{i}", schema) for i, schema in enumerate(schemas)]
    with serving(config=config) as served:
        for _ in range(2):
            phases = sent(served, CHAT, tools=tools)
            assert phases is not None and phases.calls is not None
            assert sent(served, CHAT) is not None
        assert served.engine.metrics.num_unconstrained_calls == 0


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_that_are_no_object(calling: Served, choice: str) -> None:
    tools = [tool("f", {"type": "object"}), tool("g", {"type": "string"})]
    response = calling.post(CHAT, {"messages": USER, "tools": tools, "tool_choice": choice})
    assert check_error(response, 400, "tools")["message"].startswith("tools[1].function.parameters")


# A tool in each API, and the place of the schema.
WITH_SCHEMA: dict[str, Any] = {
    CHAT: (lambda schema: tool("f", schema), "tools[1].function.parameters"),
    "/api/chat": (lambda schema: tool("f", schema), "tools[1].function.parameters"),
    RESPONSES: (lambda schema: {"type": "function", "name": "f", "parameters": schema}, "tools[1].parameters"),
    MESSAGES: (lambda schema: {"name": "f", "input_schema": schema}, "tools[1].input_schema"),
}


@pytest.mark.parametrize("tool_grammar", TOOL_GRAMMARS)
def test_schemas_with_wrong_types(tool_grammar: str) -> None:
    """The error names the field in each API, with and without grammars."""
    bad = {"type": "object", "properties": {"x": {"type": 5}}}
    faults = [(bad, " is not a JSON schema: properties.x.type must be a string or a list of strings")]
    for wrong in ([], False, True, "object", 5, [{"type": "object"}]):
        faults.append((wrong, f": Input should be an object, got {wrong!r}"))
    with serving(tool_grammar) as served:
        for path, (made, place) in WITH_SCHEMA.items():
            for schema, problem in faults:
                for more in ({}, {"tool_choice": REQUIRED[path]} if path in REQUIRED else {}):
                    tools = [BODIES[path]["tools"][0], made(schema)]
                    response = served.post(path, {"model": MODEL, **BODIES[path], "tools": tools, **more})
                    assert response.status_code == 400, response.text
                    error = response.json()["error"]
                    assert (error if isinstance(error, str) else error["message"]) == place + problem


def without_null(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: without_null(inner) for name, inner in value.items() if inner is not None}


@pytest.mark.parametrize("path", WITH_SCHEMA)
def test_no_parameters(calling: Served, path: str) -> None:
    """Null is the same as an absent schema: a call that the model begins has no arguments."""
    made, _ = WITH_SCHEMA[path]
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = (made(None), without_null(made(None)), made(empty))
    of_null, of_absent, of_empty = (sent(calling, path, tools=[one]) for one in tools)
    assert of_null is not None and of_null == of_absent == of_empty
