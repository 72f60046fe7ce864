"""Bodies of ``/v1/responses``, and their conversion to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from metal_engine.errors import short
from metal_engine.server.errors import invalid, validated
from metal_engine.server.openai.input_items import Item, complete_items
from metal_engine.server.protocol import ChatCompletionBody, ImageURL, LongDict, LongList, ReasoningBody, RequestModel

Message = dict[str, Any]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseTool(RequestModel):
    """A function, or a namespace that contains functions."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: LongList[ResponseTool] | None = None


class ResponseToolChoice(RequestModel):
    type: str
    name: str | None = None
    namespace: str | None = None


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(ReasoningBody):
    """Settings of the reasoning. ``summary`` has no effect: responses contain no summaries."""

    mode: Literal["standard"] | None = None
    summary: str | None = None


class ResponsesBody(RequestModel):
    """Body of ``POST /v1/responses``. ``None`` always means the default."""

    model: str | None = None
    input: str | LongList[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: LongList[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: LongDict[str] | None = None
    text: TextOptions | None = None
    reasoning: ResponseReasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    include: LongList[str] | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None


class Response(BaseModel):
    """A response. An unfinished response has the output so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    model: str
    output: list[dict[str, Any]] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True


# Maps a field of the chat to the field of the request that it is converted from.
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}


# Entry of `include` for log probabilities. Other entries are about tools that the server refuses, or about images.
_LOGPROBS = "message.output_text.logprobs"
# Fields with the same meaning in a chat.
_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user")


def to_chat(body: ResponsesBody, earlier: list[Item]) -> tuple[ChatCompletionBody, list[Item]]:
    """Convert a request to a chat. Return the chat, and the items of the conversation including the request's input.

    The chat begins with the instructions. The items lack them, because instructions apply to one request only.

    Args:
        earlier: items of the conversation up to ``previous_response_id``, including that response's output.

    Raises:
        APIError: status 400, naming the field at fault.
    """
    if body.background and body.store is False:
        raise invalid(" needs a response that is stored: store must be true", where="background")
    if body.truncation == "auto":
        raise invalid("truncation must be disabled: the server drops nothing of the input", param="truncation")
    if _LOGPROBS in (body.include or ()):
        raise invalid(f" of {_LOGPROBS} is not supported", where="include", code="unsupported_parameter")
    messages = input_messages(body.input, earlier)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields = {
        **{name: getattr(body, name) for name in _SAME},
        "messages": system + messages,
        "max_completion_tokens": body.max_output_tokens,
    }
    if body.tools:
        fields["tools"] = _tools(body.tools)
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text is not None:
        fields["verbosity"] = body.text.verbosity
        fields["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning"] = body.reasoning.model_dump(include=set(ReasoningBody.model_fields))
    given = {name: value for name, value in fields.items() if value is not None}
    chat = validated(ChatCompletionBody, {**(body.model_extra or {}), **given})
    return chat, [*earlier, *complete_items(body.input, earlier)]


def _tools(tools: list[ResponseTool]) -> list[dict[str, Any]]:
    """Convert tools to functions of a chat. Functions in a namespace get their names from :func:`full_name`.

    Raises APIError, a 400, for a tool that is not a function, and for a missing name in a namespace.
    """
    functions = []
    for i, tool in enumerate(tools):
        if tool.type != "namespace":
            functions.append(_function(f"tools[{i}]", tool))
            continue
        for j, inner in enumerate(tool.tools or ()):
            function = _function(f"tools[{i}].tools[{j}]", inner)
            if not tool.name or not inner.name:
                raise invalid(f"tools[{i}]: a namespace and its functions need names", param="tools")
            function["function"]["name"] = full_name(tool.name, inner.name)
            functions.append(function)
    return functions


def _function(place: str, tool: ResponseTool) -> dict[str, Any]:
    if tool.type != "function":
        raise invalid(
            f"{place}: type {short(tool.type)} is not supported; the server has functions only", param="tools"
        )
    return {"type": "function", "function": tool.model_dump(exclude={"type", "tools"}, exclude_none=True)}


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function for the model, e.g. ``files__read`` for ``read`` in the namespace ``files``."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def namespaces(tools: list[ResponseTool] | None) -> dict[str, tuple[str, str]]:
    """Map the full name of each function in a namespace to the pair (namespace, name in that namespace)."""
    return {
        full_name(tool.name, inner.name): (tool.name, inner.name)
        for tool in tools or ()
        if tool.type == "namespace" and tool.name
        for inner in tool.tools or ()
        if inner.name
    }


def _tool_choice(choice: str | ResponseToolChoice) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.type != "function" or choice.name is None:
        raise invalid("tool_choice must be a mode, or name a function", param="tool_choice")
    return {"type": "function", "function": {"name": full_name(choice.namespace, choice.name)}}


def _response_format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": given.model_extra or {}}


def input_messages(given: str | list[Item], earlier: Sequence[Item] = ()) -> list[Message]:
    """Convert the items of a conversation to chat messages. All items of one assistant turn become one message.

    Args:
        given: input of the request.
        earlier: items of the stored conversation before the input, which are valid.

    Raises:
        APIError: status 400, for an item that cannot be part of a chat.
    """
    if not given and not isinstance(given, str):
        raise invalid("input must not be empty", param="input")
    messages: list[Message] = []
    for item in earlier:
        _add_item(messages, item, "previous_response_id")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        try:
            _add_item(messages, item, f"input[{i}]")
        except (KeyError, TypeError, AttributeError) as error:
            raise invalid(f"input[{i}] lacks or mistypes a field: {error}", param="input") from error
        except ValueError as error:
            raise invalid(f"input[{i}]: {error}", param="input") from error
    return messages


def _add_item(messages: list[Message], item: dict[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if item["role"] == "assistant":
            # Text after calls belongs to their message: some templates require the results directly after it.
            has_calls = bool(messages) and "tool_calls" in messages[-1]
            turn = _assistant(messages, fresh=None if has_calls else "content")
            turn.setdefault("content", []).append({"type": "text", "text": _text(item["content"])})
        else:
            messages.append({"role": item["role"], "content": _content(item["content"], f"{place}.content")})
    elif kind == "function_call":
        function = {"name": full_name(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
        turn = _assistant(messages)
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "function_call_output":
        messages.append(
            {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"], f"{place}.output")}
        )
    elif kind == "reasoning":
        text = _text(item.get("content") or []) or _text(item.get("summary") or [])
        if text:
            _assistant(messages, fresh="reasoning")["reasoning"] = text
    else:
        raise ValueError(f"items of type {short(kind)} are not supported")


def _assistant(messages: list[Message], fresh: str | None = None) -> Message:
    """Return the assistant's current message.

    Append a new message if the last message is not from the assistant, or already has a value in the field ``fresh``.
    """
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or (fresh is not None and last.get(fresh) is not None):
        last = {"role": "assistant"}
        messages.append(last)
    return last


_IMAGE = "input_image"
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def _content(content: Any, place: str) -> Any:
    """Return the content of a chat message: a text, or content parts if there are images.

    Raises:
        APIError: status 400, for an invalid image.
        ValueError, KeyError, TypeError: a part has an unsupported type, or lacks a field.
    """
    if isinstance(content, str) or not any(part["type"] == _IMAGE for part in content):
        return _text(content)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if part["type"] != _IMAGE:
            parts.append({"type": "text", "text": _text([part])})
            continue
        url, detail = part.get("image_url"), part.get("detail")
        if not isinstance(url, str):
            problem = " must be a string: an input_image needs it, and file_id is not supported"
            raise invalid(problem, where=f"{place}[{i}].image_url")
        if not isinstance(detail, str | None):
            raise invalid(" must be a string", where=f"{place}[{i}].detail")
        image = ImageURL.placed(url, f"{place}[{i}].image_url", detail)
        parts.append({"type": "image_url", "image_url": image})
    return parts


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part["type"] not in _TEXT_PARTS:
            raise ValueError(f"content of type {short(part['type'])} is not supported here")
        texts.append(part["refusal" if part["type"] == "refusal" else "text"])
    return "\n".join(texts)
