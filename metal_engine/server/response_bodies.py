"""Wire format of the OpenAI API: bodies of responses, chunks of streams, and errors, field for field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict  # typing's own TypedDict works with pydantic only from Python 3.12 on

from metal_engine.server.json_parts import Placeholder
from metal_engine.server.usage import Usage

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class CompletionLogprobs(BaseModel):
    """Parallel lists with one entry for each token. The first token of a prompt has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob] | None
    refusal: None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]

_Placeholder = SkipJsonSchema[Placeholder]  # internal, so it stays out of the OpenAPI schema
_TokenIds = Annotated[list[int] | _Placeholder | None, Field(exclude_if=lambda value: value is None)]


class CompletionChoice(BaseModel):
    """Output for one prompt. In a stream, the next piece of that output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | _Placeholder | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | _Placeholder | None = None
    prompt_token_ids: _TokenIds = None
    token_ids: _TokenIds = None


class KVTransferHandover(BaseModel):
    """``kv_transfer_params`` of a response. The client copies it into its request to the engine that continues."""

    do_remote_prefill: Literal[True] = True


class _Answer(BaseModel):
    """Fields that full responses and stream chunks share."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: KVTransferHandover | None = Field(default=None, exclude_if=lambda value: value is None)


class Completion(_Answer):
    """Full completion, or one chunk of a streamed completion. Both have the same shape."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class FunctionCall(BaseModel):
    """Function call. ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class ChatToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """Assistant message.

    ``reasoning_content`` is the older name of ``reasoning``. Both are absent if the model did not reason.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ChatToolCall] | None = Field(default=None, exclude_if=lambda value: value is None)
    reasoning: str | None = Field(default=None, exclude_if=lambda value: value is None)
    reasoning_content: str | None = Field(default=None, exclude_if=lambda value: value is None)


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | _Placeholder | None = None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None
    token_ids: _TokenIds = None


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | _Placeholder | None = None
    prompt_token_ids: _TokenIds = None


class FunctionCallDelta(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    index: int
    id: str
    type: Literal["function"]
    function: FunctionCallDelta


class Delta(TypedDict, total=False):
    """Additions of a chunk to the message. Fields without an addition are left out."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: _TokenIds = None


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: _TokenIds = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail
