"""Plans the use of a request's tools: which tools are described to the model, and which tools it must call."""

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
    """Use of a request's tools. Tools are in OpenAI's form.

    Attributes:
        shown: tools passed to the chat template.
        prompted: tools that a system message describes instead, for templates that do not support tools.
        parsed: tools whose calls are parsed from the text.
        forced: True if the output must consist of tool calls only.
        name: name of the only tool that must be called; None if there is no such tool.
        parallel: True if several calls are allowed.
        parser: parser of the model's own call format; None if unknown.
    """

    shown: list[Tool] = field(default_factory=list)
    prompted: list[Tool] = field(default_factory=list)
    parsed: list[Tool] = field(default_factory=list)
    forced: bool = False
    name: str | None = None
    parallel: bool = True
    parser: ToolParser | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of a forced output. Raises ParameterError if a tool's parameters have no valid schema."""
        return forced_schema(self.shown or self.prompted, self.name, parallel=self.parallel)

    @property
    def instructions(self) -> str | None:
        """Text that describes the tools to the model if its chat template does not; None if there are no such tools."""
        if not self.prompted:
            return None
        return (
            forced_instructions(self.prompted, self.name) if self.forced else instructions(self.prompted, self.parser)
        )


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
    """Plan the use of a request's tools.

    Args:
        tools: tools of the request, in OpenAI's form.
        choice: ``none``, ``auto`` or ``required``. None means ``auto``.
        answer_format: output format of the model.
        name: name of the only tool that must be called, with ``required``.
        parallel: True if several calls are allowed.
        template_takes_tools: True if the model's chat template supports tools.
        auto_tool_choice: True if the server allows the model to decide about tool calls.

    Raises:
        ParameterError: the choice does not fit the tools, or the model does not support it.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ParameterError("tool_choice", "needs tools")
        return NO_TOOLS
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise ParameterError("tools", "has two functions with the same name")
    if choice == "none":
        return NO_TOOLS  # a model does not call tools that it does not see
    listed = list(tools)
    if choice == "required":
        if name is not None and name not in names:
            raise ParameterError("tool_choice", f"names {short(name)}, which is not among the tools")
        shown, prompted = (listed, []) if template_takes_tools else ([], listed)
        return ToolPlan(shown=shown, prompted=prompted, forced=True, name=name, parallel=parallel)
    if not auto_tool_choice:
        raise ParameterError("tool_choice", '"auto" is off on this server (--enable-auto-tool-choice)')
    if not template_takes_tools and answer_format.finds_calls:
        return ToolPlan(prompted=listed, parsed=listed, parallel=parallel, parser=answer_format.tool)
    if answer_format.tool is None:
        problem = "need a model whose tool call format is known: set the format with --tool-call-parser"
        raise ParameterError("tools", problem)
    return ToolPlan(shown=listed, parsed=listed, parallel=parallel)
