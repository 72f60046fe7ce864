"""The wire format: OpenAI's request and response bodies, field for field.

Types are strict (``"16"`` is no number, ``true`` no integer). What a field may hold beyond its type is
checked where it is used; fields that are not declared here are kept, and
:mod:`metal_engine.server.generation.parameters` judges them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict  # typing's own, which pydantic takes from Python 3.12 on

from metal_engine.server.large_bodies import IN_PIECES

# One error for a list, not one for each of its 100,000 elements.
_TextList = Annotated[list[str], Field(fail_fast=True), IN_PIECES]
_TokenIds = Annotated[list[int], Field(fail_fast=True), IN_PIECES]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


# --- requests -----------------------------------------------------------------------------------------------


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KVTransferParams(_Body):
    """What another engine has to do with the prompt's KV: compute it for this one, or wait for it from this one."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False


class GenerationBody(_Body):
    """What completions and chat completions have in common. ``None`` always means the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | _TextList | None = None
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: _TokenIds | None = None
    bad_words: _TextList | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: KVTransferParams | None = None
    user: str | None = None

    @property
    def prompt_field(self) -> str:
        """Name of the field that has the prompt."""
        return "prompt"

    @property
    def max_tokens_field(self) -> str:
        """Name of the field that limits the output."""
        return "max_tokens"

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate at most; None for as many as fit."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each output token whose log probabilities are wanted; None for no log probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt."""
        return self.prompt_logprobs

    @property
    def logprobs_field(self) -> str:
        """Name of the field that has the number of alternatives."""
        return "logprobs"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options is not None and self.stream_options.continuous_usage_stats
        )


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | _TextList | _TokenIds | Annotated[list[_TokenIds], Field(fail_fast=True), IN_PIECES]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def is_echo_only(self) -> bool:
        """The prompt is wanted back, and nothing else."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        if self.is_echo_only:
            return 1  # the least that can be generated; it is not shown
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


class ContentPart(_Body):
    type: str
    text: str | None = None


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True), IN_PIECES] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True), IN_PIECES] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(_Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(_Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Body):
    name: str


class NamedToolChoice(_Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatCompletionBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), IN_PIECES]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True), IN_PIECES] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_field(self) -> str:
        return "top_logprobs"


# --- responses ----------------------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    """``kv_store_tokens`` of the cached ones came from a KV store, the others were in the KV cache."""

    cached_tokens: int = 0
    kv_store_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class CompletionLogprobs(BaseModel):
    """One entry for each token; of the first token of a prompt nothing is known."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob] | None
    refusal: None = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    """One prompt's text, or, in a stream, the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """A whole completion, or, in a stream, one chunk of it (the two have the same shape)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class FunctionCall(BaseModel):
    """``arguments`` are a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """``reasoning_content`` is ``reasoning`` by its older name; both are left out if there is none."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = Field(default=None, exclude_if=lambda value: value is None)
    reasoning: str | None = Field(default=None, exclude_if=lambda value: value is None)
    reasoning_content: str | None = Field(default=None, exclude_if=lambda value: value is None)


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionCallDelta(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    index: int
    id: str
    type: Literal["function"]
    function: FunctionCallDelta


class Delta(TypedDict, total=False):
    """What a chunk adds to the message: only fields that it adds to are there."""

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


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error, whatever its cause."""

    error: ErrorDetail
