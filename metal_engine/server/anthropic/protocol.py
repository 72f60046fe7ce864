"""Bodies of Anthropic's ``/v1/messages``, and their conversion to a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from metal_engine.errors import short
from metal_engine.server.errors import invalid, validated
from metal_engine.server.large_bodies import dumps
from metal_engine.server.protocol import ChatCompletionBody, ImageURL, LongList, RequestModel
from metal_engine.server.tool_limit import checked_tools

Message = dict[str, Any]
Part = dict[str, Any]


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | LongList[dict[str, Any]]


class AnthropicTool(RequestModel):
    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(RequestModel):
    """Body of ``POST /v1/messages/count_tokens``: the fields of a message request that affect its prompt.

    ``output_format`` is the older name of ``output_config.format``. ``context_management`` has no effect: no
    part of the conversation is removed.
    """

    model: str
    messages: Annotated[LongList[AnthropicMessage], Field(min_length=1)]
    system: str | LongList[dict[str, Any]] | None = None
    tools: LongList[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """Body of ``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: LongList[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class AnthropicOutputTokens(BaseModel):
    thinking_tokens: int = 0


class AnthropicUsage(BaseModel):
    """Token counts. ``input_tokens`` excludes tokens from the prefix cache.

    In the event ``message_start``, ``input_tokens`` includes cached tokens, because their number is not known yet.
    """

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: AnthropicOutputTokens = AnthropicOutputTokens()


class AnthropicResponse(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


# Maps a field of the chat to the field of the request that it is made from.
RENAMED = {
    "stop": "stop_sequences",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config",
    "response_format.json_schema": "output_config.format",
}
# Maps efforts that chat templates do not support to the highest one that they support.
_HIGHEST = {"xhigh": "high", "max": "high"}
# Supported blocks of user messages and of the results of calls.
_CONTENT = "text and images"


def to_chat(body: CountTokensBody) -> ChatCompletionBody:
    """Convert a message request to a chat request. Undeclared fields are kept.

    Raises:
        APIError: status 400, naming the field at fault.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = checked_tools(_tool(i, tool) for i, tool in enumerate(body.tools))
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    fields["thinking_token_budget"] = _thinking_budget(body)
    if variables := _template_variables(body):
        fields["chat_template_kwargs"] = variables
    if (output_format := _output_format(body)) is not None:
        schema = {"name": "output", "schema": output_format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        fields["stop"] = body.stop_sequences
    given = {name: value for name, value in fields.items() if value is not None}
    return validated(ChatCompletionBody, {**(body.model_extra or {}), **given})


def _output_format(body: CountTokensBody) -> OutputFormat | None:
    newer = body.output_config.format if body.output_config is not None else None
    if newer is not None and body.output_format is not None:
        raise invalid(" and output_config.format exclude each other", where="output_format")
    return newer or body.output_format


def _thinking_budget(body: CountTokensBody) -> int | None:
    """Return the maximum number of reasoning tokens; None for no limit.

    Raises APIError, a 400, for a budget of less than 1 or at least ``max_tokens``, and for any budget if the type of
    ``thinking`` is not ``enabled``.
    """
    thinking = body.thinking
    if thinking is None or thinking.budget_tokens is None:
        return None
    budget, where = thinking.budget_tokens, "thinking.budget_tokens"
    if thinking.type != "enabled":
        raise invalid(f" needs the type enabled, got {thinking.type}", where=where)
    if budget < 1:
        raise invalid(f" must be at least 1, got {short(budget)}", where=where)
    if isinstance(body, MessagesBody) and budget >= body.max_tokens:
        raise invalid(f" must be less than max_tokens {short(body.max_tokens)}, got {short(budget)}", where=where)
    return budget


def _template_variables(body: CountTokensBody) -> dict[str, Any]:
    """Return the template variables about reasoning. A chat template that does not use them ignores them."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None:
        variables["reasoning_effort"] = _HIGHEST.get(effort, effort)
    return variables


def _tool(i: int, tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise invalid(f"tools[{i}]: type {short(tool.type)} is not supported; the server runs no tools", param="tools")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice of type tool needs a name", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _messages(body: CountTokensBody) -> list[Message]:
    messages: list[Message] = []
    if body.system:
        try:
            messages.append({"role": "system", "content": _text(body.system)})
        except (KeyError, TypeError, ValueError) as error:
            raise invalid(f"system: {_problem(error)}", param="system") from error
    if body.messages[0].role == "system":
        raise invalid("messages[0].role: the first message is not a system message: that is system", param="messages")
    for i, message in enumerate(body.messages):
        try:
            messages += _TURNS[message.role](message.content, f"messages[{i}].content")
        except (KeyError, TypeError, ValueError) as error:
            raise invalid(f"messages[{i}].content: {_problem(error)}", param="messages") from error
    return messages


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"a field is missing or of the wrong type: {error}"


def _user_turn(content: str | list[dict[str, Any]], place: str) -> list[Message]:
    """Convert a user turn. Tool results become separate messages before the user's text, as chat templates expect.

    Raises as :func:`_content`.
    """
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[Message] = []
    blocks: list[tuple[dict[str, Any], str]] = []  # text and images, each with its path
    for i, block in enumerate(content):
        block_place = f"{place}[{i}]"
        if block["type"] == "tool_result":
            result = _result(block.get("content") or "", block_place)
            if block.get("is_error"):
                result = _with_error(result)
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        else:
            blocks.append((block, block_place))
    if not blocks and results:
        return results
    return [*results, {"role": "user", "content": _content(blocks)}]


def _result(content: str | list[dict[str, Any]], place: str) -> str | list[Part]:
    if isinstance(content, str):
        return content
    return _content([(block, f"{place}.content[{i}]") for i, block in enumerate(content)])


def _with_error(content: str | list[Part]) -> str | list[Part]:
    """Return the content of a failed call's result, with ``Error:`` at its start."""
    return f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]


def _content(blocks: list[tuple[dict[str, Any], str]]) -> str | list[Part]:
    """Convert content blocks to one text, or to a list of parts if there are images.

    Args:
        blocks: pairs of a block and its path in the request.

    Raises:
        APIError: status 400, for an invalid image.
        ValueError, KeyError, TypeError: a block has an unsupported type, or lacks a field.
    """
    if all(block["type"] != "image" for block, _ in blocks):
        return _text([block for block, _ in blocks], _CONTENT)
    parts: list[Part] = []
    for block, place in blocks:
        if block["type"] == "image":
            parts.append({"type": "image_url", "image_url": _image(block.get("source"), f"{place}.source")})
        else:
            parts.append({"type": "text", "text": _text([block], _CONTENT)})
    return parts


def _image(source: Any, place: str) -> ImageURL:
    if not isinstance(source, dict):
        raise invalid(": an image needs a source", where=place)
    kind = source.get("type")
    if kind not in ("base64", "url"):
        problem = f": images of type {short(kind)} are not supported; send base64 or url"
        raise invalid(problem, where=place)
    field = "data" if kind == "base64" else "url"
    if not isinstance(source.get(field), str):
        raise invalid(" must be a string", where=f"{place}.{field}")
    return ImageURL.placed(source[field], f"{place}.{field}", is_base64=kind == "base64")


def _system_turn(content: str | list[dict[str, Any]], place: str) -> list[Message]:
    """Convert a system message inside the conversation. Claude Code sends such messages."""
    return [{"role": "system", "content": _text(content)}]


def _assistant_turn(content: str | list[dict[str, Any]], place: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    turn: Message = {"role": "assistant"}
    thoughts: list[str] = []
    texts: list[dict[str, Any]] = []
    for block in content:
        match block["type"]:
            case "thinking":
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass  # only Anthropic's models can read it
            case "tool_use":
                function = {"name": block["name"], "arguments": dumps(block["input"])}
                call = {"id": block["id"], "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case _:
                texts.append(block)
    if thoughts:
        turn["reasoning"] = "\n\n".join(filter(None, thoughts))
    if texts:
        turn["content"] = _text(texts)
    return [turn]


_TURNS = {"user": _user_turn, "assistant": _assistant_turn, "system": _system_turn}


def _text(content: str | list[dict[str, Any]], supported: str = "text") -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if block["type"] != "text":
            raise ValueError(f"blocks of type {short(block['type'])} are not supported here; send {supported}")
        texts.append(block["text"])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text block's text must be a string")
    return "\n".join(texts)
