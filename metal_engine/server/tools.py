"""The tools of a request: what the model is told of them, and which of them it must call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.server.errors import invalid
from metal_engine.server.parsers import Parsers
from metal_engine.server.pieces import ForcedCallSplitter, MarkSplitter, PlainSplitter, Splitter
from metal_engine.server.protocol import ChatCompletionBody, NamedToolChoice


@dataclass(frozen=True)
class ToolPlan:
    """What a request's tools come to.

    Attributes:
        shown: the tools, in OpenAI's form, that the chat template is given.
        parsed: the tools whose calls are looked for in the text.
        forced: the answer is tool calls and nothing else.
        name: the one tool that must be called.
        parallel: whether there may be several calls.
    """

    shown: list[dict[str, Any]]
    parsed: list[dict[str, Any]]
    forced: bool = False
    name: str | None = None
    parallel: bool = True

    def splitter(self, parsers: Parsers, *, in_reasoning: bool) -> Splitter:
        if self.forced:
            return ForcedCallSplitter(self.name, parallel=self.parallel)
        if not self.parsed and parsers.reasoning is None:
            return PlainSplitter()
        return MarkSplitter(parsers, self.parsed, in_reasoning=in_reasoning, parallel=self.parallel)


NO_TOOLS = ToolPlan(shown=[], parsed=[])


def plan_tools(body: ChatCompletionBody, parsers: Parsers, tokenizer: Tokenizer) -> ToolPlan:
    """Judge a request's ``tools`` and ``tool_choice``.

    Raises:
        APIError: 400, for a choice that does not fit the tools, or that this model cannot make.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", param="tool_choice")
        return NO_TOOLS
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise invalid("tools has two functions of one name", param="tools")
    if choice == "none":
        return NO_TOOLS  # what the model is not told of, it does not call
    if not tokenizer.template_takes_tools:
        raise invalid("the model's chat template does not take tools", param="tools")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    parallel = body.parallel_tool_calls is not False
    if choice in (None, "auto"):
        if not parsers.auto_tool_choice:
            raise invalid(
                'tool_choice "auto" is off on this server (--enable-auto-tool-choice)', param="tool_choice"
            )
        if parsers.tool is None:
            raise invalid(
                "the format of this model's tool calls is not known; start the server with --tool-call-parser",
                param="tools",
            )
        return ToolPlan(shown=tools, parsed=tools, parallel=parallel)
    if "structured_outputs" not in type(body).model_fields:
        raise invalid(
            'tool_choice "required", or naming a function, needs structured output, which this server does not have',
            param="tool_choice",
        )
    name = None
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise invalid(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return ToolPlan(shown=tools, parsed=[], forced=True, name=name, parallel=parallel)


def forced_schema(plan: ToolPlan) -> dict[str, Any]:
    """The JSON schema of an answer that a plan forces; what :class:`ForcedCallSplitter` reads."""
    parameters = {
        tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"}
        for tool in plan.shown
    }
    if plan.name is not None:
        return dict(parameters[plan.name])
    # References within a tool's parameters mean its own definitions, which move to the top with them.
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in parameters.items():
        schema = dict(schema)
        for key in ("$defs", "definitions"):
            definitions.setdefault(key, {}).update(schema.pop(key, {}))
        properties = {"name": {"const": name}, "parameters": schema}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not plan.parallel:
        listed["maxItems"] = 1
    return {**{key: value for key, value in definitions.items() if value}, **listed}
