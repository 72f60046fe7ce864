"""The tools of a request: what the model is told of them, and which of them it must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat, ToolParser
from metal_engine.answers.forced_calls import forced_schema
from metal_engine.answers.tool_prompts import forced_instructions, instructions
from metal_engine.errors import ParameterError, short

Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolPlan:
    """How a request's tools are used. Tools are in OpenAI's form.

    Attributes:
        shown: the tools that the chat template is given.
        told: the tools that a system message describes instead, for templates that take none.
        parsed: the tools whose calls are looked for in the text.
        forced: whether the answer is tool calls and nothing else.
        name: the one tool that must be called.
        parallel: whether there may be several calls.
        parser: of the model's own format of calls, if it has one.
    """

    shown: list[Tool] = field(default_factory=list)
    told: list[Tool] = field(default_factory=list)
    parsed: list[Tool] = field(default_factory=list)
    forced: bool = False
    name: str | None = None
    parallel: bool = True
    parser: ToolParser | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer that is forced. Raises ParameterError for tools that have none."""
        return forced_schema(self.shown or self.told, self.name, parallel=self.parallel)

    @property
    def instructions(self) -> str | None:
        """What the model is told of tools that its chat template does not take."""
        if not self.told:
            return None
        return forced_instructions(self.told, self.name) if self.forced else instructions(self.told, self.parser)


NO_TOOLS = ToolPlan()


def plan_tools(
    tools: Sequence[Tool],
    choice: str | None,
    answer_format: AnswerFormat,
    *,
    name: str | None = None,
    parallel: bool = True,
    template_takes_tools: bool,
    auto_tool_choice: bool,
) -> ToolPlan:
    """Judges a request's tools and its choice among them.

    Args:
        choice: ``none``, ``auto`` (as is None) or ``required``.
        name: the one tool that must be called, with ``required``.
        template_takes_tools: whether the model's chat template does anything with tools.
        auto_tool_choice: whether it may be left to the model to call tools.

    Raises:
        ParameterError: the choice does not fit the tools, or this model cannot make it.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ParameterError("tool_choice", "needs tools")
        return NO_TOOLS
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise ParameterError("tools", "has two functions of one name")
    if choice == "none":
        return NO_TOOLS  # what the model is not told of, it does not call
    listed = list(tools)
    if choice == "required":
        if name is not None and name not in names:
            raise ParameterError("tool_choice", f"names {short(name)}, which is not among the tools")
        shown, told = (listed, []) if template_takes_tools else ([], listed)
        return ToolPlan(shown=shown, told=told, forced=True, name=name, parallel=parallel)
    if not auto_tool_choice:
        raise ParameterError("tool_choice", '"auto" is off on this server (--enable-auto-tool-choice)')
    if not template_takes_tools and answer_format.finds_calls:
        return ToolPlan(told=listed, parsed=listed, parallel=parallel, parser=answer_format.tool)
    if answer_format.tool is None:
        problem = "need a model whose format of tool calls is known: name the format with --tool-call-parser"
        raise ParameterError("tools", problem)
    return ToolPlan(shown=listed, parsed=listed, parallel=parallel)
