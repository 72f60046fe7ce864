"""Chat messages as clients send them -> messages as chat templates read them."""

from __future__ import annotations

from typing import Any

from metal_engine.engine.chat_template import RESERVED_NAMES
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.errors import short
from metal_engine.server.errors import invalid
from metal_engine.server.large_bodies import TextsDecoder, TooComplexError
from metal_engine.server.protocol import ChatCompletionBody, ChatMessage, ContentPart

# Chat templates were written before OpenAI renamed the system role for newer models.
_TEMPLATE_ROLES = {"developer": "system"}


def template_messages(messages: list[ChatMessage], instructions: str | None = None) -> list[dict[str, Any]]:
    """Messages for :meth:`metal_engine.engine.tokenizer.Tokenizer.apply_chat_template`.

    Args:
        instructions: what the system message says beside its own text.

    Raises:
        APIError: 400, for content that is not text.
    """
    arguments = TextsDecoder()
    result = [_template_message(i, message, arguments) for i, message in enumerate(messages)]
    if instructions is not None:
        own = result.pop(0)["content"] if result[0]["role"] == "system" else ""
        result.insert(0, {"role": "system", "content": f"{own}\n\n{instructions}".lstrip()})
    return result


# Names that the server itself or another field gives a value, or that mean nothing to a template.
_NOT_FOR_TEMPLATES = frozenset(
    {
        "conversation", "messages", "documents", "tools", "chat_template", "tokenize", "add_generation_prompt",
        "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
    | RESERVED_NAMES
)  # fmt: skip


def template_kwargs(body: ChatCompletionBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """The template's variables beside the messages: ``chat_template_kwargs``, and the reasoning effort.

    Raises:
        APIError: 400, for names that are not for templates, and for an effort that the template does not know.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name in _NOT_FOR_TEMPLATES:
            raise invalid(f" cannot set {name}", where="chat_template_kwargs")
    if body.reasoning_effort is None:
        return kwargs
    if tokenizer.template_mentions("reasoning_effort"):
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    elif tokenizer.template_mentions("enable_thinking"):
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
    elif body.reasoning_effort != "none":
        problem = " is not supported: the model's chat template does not know it"
        raise invalid(problem, where="reasoning_effort", code="unsupported_parameter")
    return kwargs


def template_flags(body: ChatCompletionBody) -> dict[str, Any]:
    """How the prompt ends: where the assistant begins (the default), or within its last message (a prefill)."""
    if not body.continue_final_message:
        return {"add_generation_prompt": body.add_generation_prompt is not False}
    if body.add_generation_prompt:
        raise invalid(" and add_generation_prompt exclude each other", where="continue_final_message")
    if body.messages[-1].role != "assistant":
        raise invalid(" needs a last message of the role assistant", where="continue_final_message")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _template_message(index: int, message: ChatMessage, arguments: TextsDecoder) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        raise invalid(f" is required for the role {message.role}", where=f"messages[{index}].content")
    # Templates concatenate content, so an absent one (an assistant that only called tools) is an empty text.
    result: dict[str, Any] = {
        "role": _TEMPLATE_ROLES.get(message.role, message.role),
        "content": _text(index, message.content or ""),
    }
    result |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        # Templates have either name for it.
        result["reasoning"] = result["reasoning_content"] = reasoning
        if not result["content"]:  # gpt-oss's takes it for the same as the content of a message with calls
            result["thinking"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call, arguments) for call in message.tool_calls]
    return result


def _text(index: int, content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        place = f"messages[{index}].content[{i}]"
        if part.type != "text":
            problem = f": content of type {short(part.type)} is not supported; the model takes text only"
            raise invalid(problem, where=place)
        if part.text is None:
            raise invalid(" is required", where=f"{place}.text")
        texts.append(part.text)
    return "\n".join(texts)  # as vLLM joins them


def _tool_call(call: dict[str, Any], decoder: TextsDecoder) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect them; clients send a string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = decoder.loads(function["arguments"])
    except TooComplexError as error:
        raise invalid(f": a call's arguments {error}", where="messages") from error
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
