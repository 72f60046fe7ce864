"""Converts the chat messages of a request to messages in the format of chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from metal_engine.answers.answer_format import ToolParser
from metal_engine.answers.tool_prompts import with_instructions, written_calls, written_result
from metal_engine.errors import short
from metal_engine.server.errors import invalid
from metal_engine.server.large_bodies import ContentLimits, TooComplexError, dumps
from metal_engine.server.openai.image_parts import without_tool_images
from metal_engine.server.openai.message_order import with_single_calls
from metal_engine.server.openai.reasoning_options import ReasoningOptions
from metal_engine.server.protocol import ChatCompletionBody, ChatMessage, ContentPart
from metal_engine.text.chat_template import REASONING_SWITCHES, RESERVED_NAMES
from metal_engine.text.content_parts import IMAGE, Content, Part, joined, merged, text_part, without_images
from metal_engine.text.message_rules import MessageRules
from metal_engine.text.tokenizer import Tokenizer

# Chat templates were written before OpenAI renamed the system role for newer models.
_TEMPLATE_ROLES = {"developer": "system"}
# Maximum length of a tool's name.
_MAX_NAME = 256


def template_messages(
    messages: list[ChatMessage],
    instructions: str | None = None,
    *,
    tokenizer: Tokenizer,
    parser: ToolParser | None = None,
) -> list[dict[str, Any]]:
    """Return messages for :meth:`metal_engine.text.tokenizer.Tokenizer.apply_chat_template`.

    Args:
        instructions: additional text for the system message; None for no text.
        tokenizer: tokenizer with the chat template. If the template does not support tool calls, calls and their
            results become text.
        parser: parser of the model's own call format. Calls become JSON objects between the marks of this format. None
            for the marks of ``JSON_CALLS``.

    Raises:
        APIError: status 400, in these cases:

            - Content is missing or unsupported.
            - Arguments of calls are too complex, or have a type that the template refuses.
            - A call that has to become text has no name.
    """
    as_text = any(message.role == "tool" or message.tool_calls for message in messages) and not (
        tokenizer.template_takes_tools or tokenizer.message_rules.writes_calls
    )
    is_text = as_text or tokenizer.message_rules.takes_only_text_arguments
    arguments = None if is_text else ContentLimits()
    result = [_template_message(i, message, arguments) for i, message in enumerate(messages)]
    if as_text:
        result = _with_calls_as_text(result, parser)
    else:
        _check_arguments(result, tokenizer.message_rules)
    result = with_single_calls(result, tokenizer.message_rules)
    result = without_tool_images(result, tokenizer.message_rules)
    if instructions is not None:
        return with_instructions(result, instructions)
    return result


# Variables that the server or another field sets, or that have no meaning for a template.
_NOT_FOR_TEMPLATES = frozenset(
    {
        "conversation", "messages", "documents", "tools", "chat_template", "tokenize", "add_generation_prompt",
        "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
    | RESERVED_NAMES
)  # fmt: skip


def template_kwargs(body: ChatCompletionBody, options: ReasoningOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the variables of the chat template.

    These are the client's ``chat_template_kwargs``, the reasoning effort, and the switches that turn reasoning on or
    off. The last two are set only if the template uses them, and never override the client's variables. If the effort
    is set to another value than ``none``, the switches are left out.

    Raises:
        APIError: status 400, for a reserved name in ``chat_template_kwargs``.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name in _NOT_FOR_TEMPLATES:
            raise invalid(f" cannot set {name}", where="chat_template_kwargs")
    if options.effort is not None and tokenizer.template_mentions("reasoning_effort"):
        kwargs.setdefault("reasoning_effort", options.effort)
        if options.effort != "none":
            return kwargs
    for name in filter(tokenizer.template_mentions, REASONING_SWITCHES if options.is_enabled is not None else ()):
        kwargs.setdefault(name, options.is_enabled)
    return kwargs


def ignores_effort(options: ReasoningOptions, tokenizer: Tokenizer) -> bool:
    """Return True if a request has a reasoning effort, and the chat template has no variable about reasoning."""
    asks = options.effort not in (None, "none")
    return asks and not any(map(tokenizer.template_mentions, ("reasoning_effort", *REASONING_SWITCHES)))


def template_flags(body: ChatCompletionBody) -> dict[str, Any]:
    """Return the template's flags about the end of the prompt.

    A prompt ends with the start of a new assistant message. With ``add_generation_prompt: false``, it ends with the
    last message. With ``continue_final_message``, it ends within the last message, which the model continues.

    Raises:
        APIError: status 400, if the fields conflict, or the message to continue is not the assistant's.
    """
    if not body.continue_final_message:
        return {"add_generation_prompt": body.add_generation_prompt is not False}
    if body.add_generation_prompt:
        raise invalid(" and add_generation_prompt exclude each other", where="continue_final_message")
    if body.messages[-1].role != "assistant":
        raise invalid(" needs a last message of the role assistant", where="continue_final_message")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _check_arguments(messages: list[dict[str, Any]], rules: MessageRules) -> None:
    """Raise APIError, a 400, for arguments that are not an object, if the template accepts only objects."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", ())):
            function = call.get("function")
            is_other = isinstance(function, dict) and not isinstance(function["arguments"], dict)
            if is_other and not rules.takes_text_arguments:
                problem = " is not a JSON object, which the model's chat template requires"
                raise invalid(problem, where=f"messages[{i}].tool_calls[{j}].function.arguments")


def _with_calls_as_text(messages: list[dict[str, Any]], parser: ToolParser | None) -> list[dict[str, Any]]:
    """Return messages for a template that supports neither calls nor results. Changes the given messages.

    Results become user messages. User text after a result is joined to the result, because some templates require
    alternating roles. Raises as :func:`_written`.
    """
    result: list[dict[str, Any]] = []
    results: list[Content] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            results.append(_written_result(message["content"]))
            continue
        if results and message["role"] == "user":
            message["content"] = joined([*results, message["content"]], "\n")
        elif results:
            result.append({"role": "user", "content": joined(results, "\n")})
        results = []
        if calls := message.pop("tool_calls", None):
            message["content"] = written_calls(message["content"], _written(i, calls), parser)
        result.append(message)
    return [*result, {"role": "user", "content": joined(results, "\n")}] if results else result


def _written_result(content: Content) -> Content:
    """Return the result of a call for a user message. Images follow its text."""
    text, images = without_images(content)
    return joined([written_result(text), images], "") if images else written_result(text)


def _written(index: int, calls: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the name and the JSON arguments of each call of the message ``index``.

    Raises:
        APIError: status 400, for a call without a valid name, or with arguments that are too complex.
    """
    for i, call in enumerate(calls):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
            problem = f" must be a text of 1 to {_MAX_NAME} characters"
            raise invalid(problem, where=f"messages[{index}].tool_calls[{i}].function.name")
        arguments = function["arguments"]
        try:
            yield name, arguments if isinstance(arguments, str) else dumps(arguments)
        except TooComplexError as error:
            raise invalid(f": a call's arguments {error}", where="messages") from error


def _template_message(index: int, message: ChatMessage, arguments: ContentLimits | None) -> dict[str, Any]:
    """Convert one message.

    Args:
        arguments: limits on the arguments of calls, which are parsed to objects. None to keep arguments as text.

    Raises:
        APIError: status 400, for missing or unsupported content, or for arguments that exceed the limits.
    """
    if message.content is None and message.role != "assistant":
        raise invalid(f" is required for the role {message.role}", where=f"messages[{index}].content")
    # Templates concatenate content, so a missing content becomes an empty text (a message that only calls tools).
    result: dict[str, Any] = {
        "role": _TEMPLATE_ROLES.get(message.role, message.role),
        "content": _content(index, message.content or ""),
    }
    result |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        # Templates use either name.
        result["reasoning"] = result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call, arguments) for call in message.tool_calls]
    return result


def _content(index: int, content: str | list[ContentPart]) -> Content:
    """Return the content of a message: one text, or parts if there are images. Consecutive texts are joined.

    Raises:
        APIError: status 400, for an unsupported or incomplete part.
    """
    if isinstance(content, str):
        return content
    parts: list[Part] = []
    for i, part in enumerate(content):
        place = f"messages[{index}].content[{i}]"
        if part.type == "image_url":
            parts.append(IMAGE)
            continue
        if part.type != "text":
            problem = f": content of type {short(part.type)} is not supported; send text and images (image_url)"
            raise invalid(problem, where=place)
        if part.text is None:
            raise invalid(" is required", where=f"{place}.text")
        parts.append(text_part(part.text))
    parts = merged(parts, "\n")  # same separator as vLLM
    if IMAGE in parts:
        return parts
    return parts[0]["text"] if parts else ""


def _tool_call(call: dict[str, Any], limits: ContentLimits | None) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which most templates expect. Clients send a string.

    Missing, empty and null arguments become an empty object: clients send them for a function without parameters. Other
    arguments stay unchanged if they are not valid JSON, or if ``limits`` is None.

    Raises:
        APIError: status 400, for arguments that exceed the limits.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or "{}"
    if limits is not None and isinstance(arguments, str):
        try:
            arguments = limits.loads(arguments) or {}
        except TooComplexError as error:
            raise invalid(f": a call's arguments {error}", where="messages") from error
        except (ValueError, RecursionError):
            pass
    return {**call, "function": {**function, "arguments": arguments}}
