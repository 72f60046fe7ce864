"""Shortened requests of Codex 0.169: consecutive developer messages, functions in namespaces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.test_errors import check_error
from tests.support.calling import CONFIG, answering
from tests.support.serving import MODEL, Served
from tests.text.test_message_rules import ALTERNATING, SYSTEM_FIRST
from tools.fixtures.fake_engine import TOOL_TEMPLATE

TARGET = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": "msg_0", "role": role, "content": [{"type": "input_text", "text": text}]}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "d", "strict": False, "parameters": TARGET}


def namespace(name: str, *functions: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": [function(one) for one in functions]}


REQUEST: dict[str, Any] = {
    "model": MODEL,
    "input": [
        message("developer", "You are a coding agent."),
        message("developer", "<skills_instructions>\n## Skills\n</skills_instructions>"),
        message("user", "<environment_context>\n  <shell>bash</shell>\n</environment_context>"),
        message("user", "What is in hello.txt?"),
    ],
    "tools": [function("exec_command"), namespace("multi_agent_v1", "close_agent"), namespace("mcp__files__", "read")],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "client_metadata": {"session_id": "0"},
}
CALLED = [
    ("exec_command", "exec_command", None),
    ("multi_agent_v1__close_agent", "close_agent", "multi_agent_v1"),
    ("mcp__files__read", "read", "mcp__files__"),
]
ANSWER = "".join(
    f'<tool_call>\n{{"name": "{full}", "arguments": {{"target": "a"}}}}\n</tool_call>\n' for full, _, _ in CALLED
)


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, SYSTEM_FIRST, ALTERNATING], ids=["any", "system first", "turns"])
def test_a_second_codex_turn_hits_the_cached_first_turn(template: str) -> None:
    """Calls have their namespaces. In the next turn, the first prompt is a cached prefix."""
    with answering(ANSWER, template=template) as served:
        first = served.post("/v1/responses", REQUEST).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        assert [(call["name"], call.get("namespace")) for call in calls] == [(own, space) for _, own, space in CALLED]
        assert [tool["type"] for tool in first["tools"]] == ["function", "namespace", "namespace"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "hello"} for call in calls]
        second = served.post("/v1/responses", {**REQUEST, "input": [*REQUEST["input"], *calls, *results]}).json()
        assert second["status"] == "completed"
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["input_tokens"] - CONFIG.cache.block_size
        known = {name: value for name, value in REQUEST.items() if name != "client_metadata"}
        stream = served.client().responses.create(**known, stream=True)
        items = [event.item for event in stream if event.type.startswith("response.output_item.")]
        named = [(item.name, getattr(item, "namespace", None)) for item in items]  # type: ignore[union-attr]
        assert named == [(own, space) for _, own, space in CALLED for _ in ("added", "done")]


def test_the_model_knows_functions_by_their_full_names() -> None:
    """Full names are used in the list of tools, in earlier calls, and in a forced call."""
    template = TOOL_TEMPLATE.replace("m['content'] }}", "m['content'] }}{{ (m.tool_calls or []) | tojson }}")
    call = {"type": "function_call", "call_id": "c", "name": "close_agent", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "done"}
    in_space, flat = {**call, "namespace": "multi_agent_v1"}, {**call, "name": "multi_agent_v1__close_agent"}
    with answering("x", template=template) as served:
        sizes = []
        for one in (in_space, flat):
            body = {**REQUEST, "input": [*REQUEST["input"], one, result], "max_output_tokens": 1}
            sizes.append(served.post("/v1/responses", body).json()["usage"]["input_tokens"])
        assert sizes[0] == sizes[1]
        choice = {"type": "function", "namespace": "multi_agent_v1", "name": "close_agent"}
        served.post("/v1/responses", {**REQUEST, "tool_choice": choice, "max_output_tokens": 1})
        structured = served.runner.seen_params[-1].structured_outputs
        assert structured is not None and "target" in json.dumps(structured.json)


@pytest.mark.parametrize("tools", [
    [namespace("a", "f"), function("a__f")],  # two functions with one name
    [{"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}],
    [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}],
    [{"type": "namespace", "tools": [function("f"), function("f")]}],
    [namespace("a" * 256, "f")],
    [{"type": "namespace", "name": "a", "tools": 5}],
])  # fmt: skip
def test_bad_namespaces(calling: Served, tools: list[Any]) -> None:
    check_error(calling.post("/v1/responses", {**REQUEST, "tools": tools, "max_output_tokens": 1}), 400, "tools")
