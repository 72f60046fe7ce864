"""`--tool-grammar`: the rules of calls that reach the engine, and the errors about tools' schemas."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.output_phases import OutputPhases
from metal_engine.settings.args import TOOL_GRAMMARS, ServerArgs
from metal_engine.settings.config import EngineConfig
from tests.server.test_errors import check_error
from tests.support.serving import MODEL, Served, serve
from tests.support.splitting import answer_format
from tests.support.tool_formats import RECORDED, TOOLS
from tools.fixtures.fake_engine import TOOL_TEMPLATE, fake_config, script, tiny_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
CONFIG = fake_config(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=2048)
FUNCTIONS = [tool["function"] for tool in TOOLS]
# The same request in each API.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "tools": TOOLS},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", **function} for function in FUNCTIONS]},
    MESSAGES: {
        "messages": USER,
        "max_tokens": 300,
        "tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
    },
    "/api/chat": {"messages": USER, "tools": TOOLS, "stream": False},
}
REQUIRED: dict[str, Any] = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}


def sent(served: Served, path: str, **more: Any) -> OutputPhases | None:
    """Send a request. Return the phases that reach the engine."""
    response = served.post(path, {"model": MODEL, **BODIES[path], **more})
    assert response.status_code == 200, response.text
    return served.runner.seen_params[-1].phases


def serving(tool_grammar: str = "auto", text: str = RECORDED[0].text, config: EngineConfig = CONFIG) -> Any:
    args = ServerArgs(shutdown_timeout=1, tool_grammar=tool_grammar)
    tokenizer, known = tiny_tokenizer(TOOL_TEMPLATE), answer_format("json_tools")
    return serve(script(text), config=config, tokenizer=tokenizer, args=args, answer_format=known)


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
    with serving(tool_grammar, calls if is_forced else RECORDED[0].text) as served:
        for path, choice in REQUIRED.items():
            sent(served, path, tool_choice=choice)
            params = served.runner.seen_params[-1]
            assert (params.structured_outputs is not None) == is_forced
            assert is_forced or params.phases is None
        body = {**BODIES[CHAT], "tool_choice": "required", "response_format": {"type": "json_object"}}
        (choice,) = served.post(CHAT, body).json()["choices"]
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert names == (["find_trains"] if is_forced else [name for name, _ in RECORDED[0].calls])
        assert choice["finish_reason"] == "tool_calls"
        prompt = served.tokenizer.decode(served.post("/tokenize", body).json()["tokens"])
        assert ("Answer with a function call." in prompt) == (not is_forced)


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_errors_name_the_tool() -> None:
    """The schema of the third tool cannot be compiled."""
    good = {"type": "object", "properties": {"x": {"type": "integer"}}}
    bad = {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}}
    tools = [tool(f"f{i}", bad if i == 2 else good) for i in range(5)]
    with serving() as served:
        for choice in ("required", {"type": "function", "function": {"name": "f2"}}):
            error = check_error(
                served.post(CHAT, {"messages": USER, "tools": tools, "tool_choice": choice}), 400, "tools"
            )
            assert error["message"].startswith("tools[2].function.parameters")
        inputs = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in tools]
        body = {**BODIES[MESSAGES], "model": MODEL, "tools": inputs, "tool_choice": {"type": "any"}}
        response = served.post(MESSAGES, body)
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


@pytest.mark.parametrize("tool_grammar", TOOL_GRAMMARS)
def test_schemas_with_wrong_types(tool_grammar: str) -> None:
    """The error names the field in each API, with and without grammars."""
    bad = {"type": "object", "properties": {"x": {"type": 5}}}
    problem = "is not a JSON schema: properties.x.type must be a string or a list of strings"
    functions = [FUNCTIONS[0], {"name": "f", "parameters": bad}]
    wrapped = [{"type": "function", "function": function} for function in functions]
    changes: dict[str, tuple[list[dict[str, Any]], str]] = {
        CHAT: (wrapped, "tools[1].function.parameters"),
        "/api/chat": (wrapped, "tools[1].function.parameters"),
        RESPONSES: ([{"type": "function", **function} for function in functions], "tools[1].parameters"),
        MESSAGES: (
            [{"name": one["name"], "input_schema": one["parameters"]} for one in functions], "tools[1].input_schema",
        ),
    }  # fmt: skip
    with serving(tool_grammar) as served:
        for path, (tools, place) in changes.items():
            for more in ({}, {"tool_choice": REQUIRED[path]} if path in REQUIRED else {}):
                response = served.post(path, {"model": MODEL, **BODIES[path], "tools": tools, **more})
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                message = error if isinstance(error, str) else error["message"]
                assert message == f"{place} {problem}"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_that_are_no_object(choice: str) -> None:
    tools = [tool("f", {"type": "object"}), tool("g", {"type": "string"})]
    with serving() as served:
        error = check_error(served.post(CHAT, {"messages": USER, "tools": tools, "tool_choice": choice}), 400, "tools")
        assert error["message"].startswith("tools[1].function.parameters")


# A tool in each API, and the place of the schema.
WITH_SCHEMA: dict[str, Any] = {
    CHAT: (lambda schema: tool("f", schema), "tools[0].function.parameters"),
    "/api/chat": (lambda schema: tool("f", schema), "tools[0].function.parameters"),
    RESPONSES: (lambda schema: {"type": "function", "name": "f", "parameters": schema}, "tools[0].parameters"),
    MESSAGES: (lambda schema: {"name": "f", "input_schema": schema}, "tools[0].input_schema"),
}


@pytest.mark.parametrize("path", WITH_SCHEMA)
def test_parameters_of_a_wrong_type(path: str) -> None:
    made, place = WITH_SCHEMA[path]
    with serving() as served:
        for schema in ([], False, True, "object", 5, [{"type": "object"}]):
            response = served.post(path, {"model": MODEL, **BODIES[path], "tools": [made(schema)]})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            assert message == f"{place}: Input should be an object, got {schema!r}"


def without_null(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: without_null(inner) for name, inner in value.items() if inner is not None}


@pytest.mark.parametrize("path", WITH_SCHEMA)
def test_no_parameters(path: str) -> None:
    """Null is the same as an absent schema: a call that the model begins has no arguments."""
    made, _ = WITH_SCHEMA[path]
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    with serving() as served:
        of_null, of_absent, of_empty = (
            sent(served, path, tools=[one]) for one in (made(None), without_null(made(None)), made(empty))
        )
        assert of_null is not None and of_null == of_absent == of_empty
