"""The tools of a request: what the model is told of them, and which of them it must call."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from metal_engine.answers.forced_calls import ForcedCallSplitter, forced_schema
from metal_engine.answers.formats import Parsers
from metal_engine.answers.harmony import HarmonySplitter
from metal_engine.answers.pieces import MarkSplitter, PlainSplitter, Splitter
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.errors import ParameterError
from metal_engine.server.errors import invalid
from metal_engine.server.openai.protocol import ChatCompletionBody, NamedToolChoice


@dataclass(frozen=True)
class ToolPlan:
    """What a request's tools come to.

    Attributes:
        shown: the tools, in OpenAI's form, that the chat template is given.
        told: the tools that a system message describes instead, for templates that take none.
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
    told: list[dict[str, Any]] = field(default_factory=list)

    def splitter(self, parsers: Parsers, *, in_reasoning: bool, incremental: bool) -> Splitter:
        if self.forced:
            return ForcedCallSplitter(self.name, parallel=self.parallel)
        if not self.parsed and parsers.reasoning is None:
            return PlainSplitter()
        make = HarmonySplitter if parsers.harmony else MarkSplitter
        return make(
            parsers,
            self.parsed,
            in_reasoning=in_reasoning,
            parallel=self.parallel,
            incremental=incremental,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer that is forced. Raises APIError, a 400, for tools that have none."""
        try:
            return forced_schema(self.shown or self.told, self.name, parallel=self.parallel)
        except ParameterError as error:
            raise invalid(str(error), param="tools") from error

    @property
    def instructions(self) -> str | None:
        """What the model is told of tools that its chat template does not take."""
        if not self.told:
            return None
        functions = json.dumps([tool["function"] for tool in self.told], ensure_ascii=False)
        if self.name is not None:
            return f"Answer with the parameters of a call of the function {self.name}, as JSON. Functions: {functions}"
        return f"Answer with a JSON list of function calls, each with name and parameters. Functions: {functions}"


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
    takes_tools = tokenizer.template_takes_tools
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    parallel = body.parallel_tool_calls is not False
    if choice in (None, "auto"):
        if not takes_tools:
            raise invalid(
                "the model's chat template does not take tools: it calls some only if tool_choice asks for it",
                param="tools",
            )
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
    if body.structured_outputs:
        raise invalid(
            'structured_outputs and tool_choice "required", or naming a function, exclude each other',
            param="structured_outputs",
        )
    name = None
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise invalid(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    shown, told = (tools, []) if takes_tools else ([], tools)
    return ToolPlan(shown=shown, parsed=[], forced=True, name=name, parallel=parallel, told=told)
