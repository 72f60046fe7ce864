"""Plans the use of a request's tools: where they are described to the model, and whether the model must call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat, ToolParser
from metal_engine.answers.forced_calls import forced_schema
from metal_engine.answers.tool_prompts import call_request, forced_instructions, instructions
from metal_engine.errors import ParameterError, short
from metal_engine.json_schemas.faults import schema_fault

Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolPlan:
    """Use of a request's tools. Tools are in OpenAI's form.

    Attributes:
        shown: tools passed to the chat template; empty if ``prompted`` has the tools.
        prompted: tools that a system message describes, because the chat template does not support tools.
        parsed: tools whose calls are parsed from the text in the model's call format. Empty if ``forced``.
        asked_for: True if the client requires a call.
        forced: True if a grammar makes the output consist of tool calls only, after its reasoning.
        name: name of the tool that must be called; None if the model may choose.
        parallel: True if several calls are allowed.
        parser: parser of the call format that the system message asks for; None for ``JSON_CALLS``, and without
            ``prompted``.
    """

    shown: list[Tool] = field(default_factory=list)
    prompted: list[Tool] = field(default_factory=list)
    parsed: list[Tool] = field(default_factory=list)
    asked_for: bool = False
    forced: bool = False
    name: str | None = None
    parallel: bool = True
    parser: ToolParser | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of a forced output.

        Raises:
            ParameterError: a tool's parameters are not a valid schema of an object.
        """
        return forced_schema(self.shown or self.prompted, self.name, parallel=self.parallel)

    def narrowed(self, tools: list[Tool]) -> ToolPlan:
        """Return this plan for only some of its tools. Sets ``name`` to None, so that each of them may be called."""
        shown, prompted = (tools, []) if self.shown else ([], tools)
        return replace(self, shown=shown, prompted=prompted, parsed=tools if self.parsed else [], name=None)

    @property
    def instructions(self) -> str | None:
        """Additional text for the system message; None if there is none.

        The text describes the tools if the chat template does not support tools. The text asks for a call if the client
        requires a call that no grammar forces.
        """
        if self.forced:
            return forced_instructions(self.prompted, self.name) if self.prompted else None
        texts = [instructions(self.prompted, self.parser)] if self.prompted else []
        if self.asked_for:
            texts.append(call_request(self.name))
        return "\n\n".join(texts) or None


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
    forces_calls: bool = True,
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
        forces_calls: True if a grammar forces the calls of ``required``. Otherwise, the prompt asks for them.

    Raises:
        ParameterError: in these cases:

            - A call is required without tools, or of a tool that is not among ``tools``.
            - The choice is ``auto``, which is turned off on this server.
            - Two tools have the same name.
            - A tool's parameters are not a JSON schema.
            - The model's call format is unknown, and the tools are not described by a system message.
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
    for i, tool in enumerate(listed):
        parameters = tool["function"].get("parameters")
        if not isinstance(parameters, dict | None):
            raise ParameterError(f"tools[{i}].function.parameters", f"must be an object, got {short(parameters)}")
        fault = schema_fault(parameters or {})
        if fault is not None:
            raise ParameterError(f"tools[{i}].function.parameters", f"is not a JSON schema: {fault}")
    if choice == "required":
        if name is not None and name not in names:
            raise ParameterError("tool_choice", f"names {short(name)}, which is not among the tools")
        if forces_calls:
            shown, prompted = (listed, []) if template_takes_tools else ([], listed)
            return ToolPlan(shown, prompted, asked_for=True, forced=True, name=name, parallel=parallel)
    elif not auto_tool_choice:
        raise ParameterError("tool_choice", '"auto" is off on this server (--enable-auto-tool-choice)')
    rest: dict[str, Any] = {"parsed": listed, "asked_for": choice == "required", "name": name, "parallel": parallel}
    if not template_takes_tools and answer_format.finds_calls:
        return ToolPlan(prompted=listed, parser=answer_format.tool, **rest)
    if answer_format.tool is None:
        problem = "need a model whose tool call format is known: set the format with --tool-call-parser"
        raise ParameterError("tools", problem)
    return ToolPlan(shown=listed, **rest)
