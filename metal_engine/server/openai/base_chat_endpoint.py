"""Base class of all endpoints that chat: converts messages to a prompt, and output to tool calls and reasoning."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from metal_engine.answers.chat_answers import AnswerReader, ChatAnswers
from metal_engine.answers.deltas import AnswerDelta, assemble
from metal_engine.answers.tool_faults import faulty_tool
from metal_engine.answers.tool_plan import ToolPlan, plan_tools
from metal_engine.errors import ParameterError
from metal_engine.media.sources import ImageSource
from metal_engine.sampling_params import SamplingParams
from metal_engine.server.errors import invalid, invalid_prompt
from metal_engine.server.generation.preparation import Endpoint, ServedModel
from metal_engine.server.openai.image_parts import image_sources
from metal_engine.server.openai.message_order import in_accepted_order
from metal_engine.server.openai.reasoning_options import ReasoningOptions
from metal_engine.server.openai.template_messages import (
    ignores_effort,
    template_flags,
    template_kwargs,
    template_messages,
)
from metal_engine.server.protocol import ChatCompletionBody, NamedToolChoice
from metal_engine.server.response_bodies import AssistantMessage, ChatFinishReason, ChatToolCall, FunctionCall
from metal_engine.server.tool_limit import checked_tools
from metal_engine.text.content_parts import without_images
from metal_engine.text.long_text import TextTooLongError
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_TOOLS_IN_PROMPT = (
    "the model's chat template takes no tools: the system message describes them, and calls are found in the text"
)
_BUDGET = "ignoring the limit of the reasoning: the model does not reason, or the format of its reasoning is unknown"
_EFFORT = "ignoring reasoning_effort: the model's chat template has no such setting"
_DROPPED = "dropping the line x-anthropic-billing-header from system texts: it differs from request to request"
_REORDERED = (
    "the model's chat template does not keep messages in the order of the request: leading system messages "
    "are joined, a later system message becomes user text at its place, and consecutive user messages and user text "
    "after the result of a call are joined to the message before"
)
# Lines that Claude Code adds before its system text. The model does not need them. The numbers of lines and blanks are
# limited, to limit the search time. Observed lines have at most 200 characters.
_BILLING_LINES = re.compile(
    r"(?:\s{0,64}+x-anthropic-billing-header:[^\n]{0,4096}+(?:\n|\Z)){1,8}+[\r\n]{0,64}+", re.IGNORECASE
)


def without_billing_line(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat without the lines ``x-anthropic-billing-header: ...`` at the start of its system text.

    Returns ``messages`` itself if there is no such line. The line differs in each request, so the prefix cache could
    not match anything after it. Claude Code sends it as the first block of the system text. Proxies that convert
    requests from Anthropic's to OpenAI's API put it at the start of the first message. A first message without other
    text is removed, unless the chat has no other message.

    Args:
        messages: at least one message, in the format of chat templates.
    """
    first, *others = messages
    found = _BILLING_LINES.match(first["content"]) if first["role"] == "system" else None
    if found is None:
        return messages
    rest = first["content"][found.end() :]
    return [{**first, "content": rest}, *others] if rest or not others else others


class BaseChatEndpoint(Endpoint[ChatCompletionBody]):
    """Base class of all endpoints that chat. Subclasses define the format of the response."""

    streams_arguments = True
    """True if a stream reports a call's arguments as they arrive, False if it reports only complete calls."""
    schema_place = "function.parameters"
    """Path of the parameters' JSON schema within a tool of the client's request, for error messages."""

    def __init__(self, served: ServedModel) -> None:
        self._format = served.answer_format
        self._auto_tool_choice = served.auto_tool_choice
        self._tool_grammar = served.tool_grammar
        self._warnings = served.warnings
        self._streams = False
        self._hides_reasoning = False
        self._budget: int | None = None  # maximum number of tokens of the reasoning
        self._answers: ChatAnswers
        self._given: tuple[ChatAnswers, SamplingParams]  # before `adjust`

    def image_sources(self, body: ChatCompletionBody) -> list[ImageSource]:
        return image_sources(body.messages)

    def tokenize(self, body: ChatCompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
        plan = self._tool_plan(body, tokenizer)
        self._streams = bool(body.stream)
        options = ReasoningOptions.of(body)
        self._budget = options.budget
        self._hides_reasoning = options.is_hidden
        flags = {**template_kwargs(body, options, tokenizer), **template_flags(body)}
        if ignores_effort(options, tokenizer):
            self._warnings.log(logger, _EFFORT)
        if options.budget and self._format.reasoning is None:
            self._warnings.log(logger, _BUDGET)
        if plan.shown:
            flags["tools"] = plan.shown
        try:
            parser = self._format.tool
            sent = template_messages(body.messages, plan.instructions, tokenizer=tokenizer, parser=parser)
            messages = without_billing_line(sent)
            if messages is not sent:
                self._warnings.log(logger, _DROPPED)
            ordered = in_accepted_order(messages, tokenizer.message_rules)
            if ordered is not messages:
                self._warnings.log(logger, _REORDERED)
            prompt = tokenizer.apply_chat_template(ordered, **flags)
        except TextTooLongError as error:
            # All other arguments of a template are variables of the client.
            own = error.name in ("tools", "messages", None)
            raise invalid_prompt(error, (error.name or "messages") if own else "chat_template_kwargs") from error
        except ValueError as error:
            raise invalid_prompt(error, "messages") from error
        continued = without_images(ordered[-1]["content"])[0] if body.continue_final_message else None
        self._answers = ChatAnswers.for_prompt(self._format, plan, prompt, tokenizer.decode, continued=continued)
        return [prompt]

    def _tool_plan(self, body: ChatCompletionBody, tokenizer: Tokenizer) -> ToolPlan:
        tools = checked_tools(tool.model_dump(exclude_none=True) for tool in body.tools or ())
        choice = body.tool_choice
        name = choice.function.name if isinstance(choice, NamedToolChoice) else None
        try:
            plan = plan_tools(
                tools,
                "required" if isinstance(choice, NamedToolChoice) else choice,
                self._format,
                name=name,
                parallel=body.parallel_tool_calls is not False,
                template_takes_tools=tokenizer.template_takes_tools,
                auto_tool_choice=self._auto_tool_choice,
                forces_calls=self._tool_grammar != "never",
            )
        except ParameterError as error:
            placed = self._with_client_place(error)
            raise invalid(f" {placed.message}", where=placed.name) from error
        if plan.prompted and not plan.forced:
            self._warnings.log(logger, _TOOLS_IN_PROMPT)
        if plan.asked_for and body.structured_outputs:
            problem = ' and tool_choice "required", or naming a function, exclude each other'
            raise invalid(problem, where="structured_outputs")
        return plan

    def adjust(self, params: SamplingParams) -> SamplingParams:
        self._given = self._answers, params
        self._answers, adjusted = self._applied(*self._given)
        return adjusted

    def _applied(self, answers: ChatAnswers, params: SamplingParams) -> tuple[ChatAnswers, SamplingParams]:
        try:
            return answers.applied_to(params, budget=self._budget, tool_grammar=self._tool_grammar)
        except ParameterError as error:
            raise self._with_client_place(error) from error

    def _with_client_place(self, error: ParameterError) -> ParameterError:
        """Return a copy of an error about a tool's schema, with the place of the schema in the client's request."""
        return ParameterError(error.name.replace("function.parameters", self.schema_place), error.message)

    def explained(self, error: ParameterError, compile_grammar: Callable[[SamplingParams], object]) -> ParameterError:
        answers, params = self._given
        plan = answers.plan
        if not plan.forced:
            return error

        def compile_calls(tools: list[dict[str, Any]]) -> None:
            compile_grammar(self._applied(replace(answers, plan=plan.narrowed(tools)), params)[1])

        tools = plan.shown or plan.prompted
        if plan.name is not None:
            found: int | None = [tool["function"]["name"] for tool in tools].index(plan.name)
        else:
            found = faulty_tool(tools, compile_calls)
        return ParameterError("tools" if found is None else f"tools[{found}].{self.schema_place}", error.message)

    def reader(self) -> AnswerReader:
        is_incremental = self._streams and self.streams_arguments
        return self._answers.reader(incremental=is_incremental, hides_reasoning=self._hides_reasoning)

    def chat_finish_reason(self, num_calls: int, reason: ChatFinishReason) -> ChatFinishReason:
        """Return OpenAI's finish reason of a choice with ``num_calls`` tool calls.

        It is ``tool_calls`` if there are calls, ``reason`` is ``stop``, and the client did not force the call by name.
        Otherwise, it is ``reason``.
        """
        is_call = reason == "stop" and num_calls > 0 and self._answers.plan.name is None
        return "tool_calls" if is_call else reason


def message_of(deltas: list[AnswerDelta]) -> AssistantMessage:
    """Assemble the deltas of a complete output to a message."""
    answer = assemble(deltas)
    calls = [
        ChatToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in answer.tool_calls
    ]
    return AssistantMessage(
        content=answer.content, tool_calls=calls or None, reasoning=answer.reasoning, reasoning_content=answer.reasoning
    )
