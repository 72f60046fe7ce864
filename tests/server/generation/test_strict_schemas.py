"""``strict`` in every place of a request that accepts it."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.answers.forced_calls import forced_schema
from metal_engine.errors import ParameterError
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.server.anthropic import protocol
from metal_engine.server.errors import APIError
from metal_engine.server.generation.sampling import sampling_params
from metal_engine.server.openai import responses_protocol
from metal_engine.server.protocol import ChatCompletionBody

USER: Any = [{"role": "user", "content": "hi"}]
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
    wanted = {"json": SCHEMA, **more}
    assert asked(ChatCompletionBody(messages=USER, structured_outputs=wanted)).strict is bool(strict)


def test_it_is_true_or_false() -> None:
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
