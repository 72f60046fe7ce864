"""Wire format of the OpenAI API: request bodies, field for field.

Types are strict: ``"16"`` is not accepted as a number, and ``true`` is not accepted as an integer. Limits on a field's
value beyond its type are checked where the value is used. Undeclared fields are kept, and
:mod:`metal_engine.server.generation.parameters` decides about them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from metal_engine.media.sources import Detail, ImageSource
from metal_engine.server.large_bodies import IN_PIECES

T = TypeVar("T")
# Long lists and objects. Validation reports only the first error, instead of an error for each of 100,000 elements.
LongList = Annotated[list[T], Field(fail_fast=True), IN_PIECES]
LongDict = Annotated[dict[str, T], Field(fail_fast=True)]


class RequestModel(BaseModel):
    """Base class of request bodies. Undeclared fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KVTransferParams(RequestModel):
    """KV transfer with another engine.

    With ``do_remote_prefill``, the other engine has computed the prompt's KV. With ``do_remote_decode``, the other
    engine will use the KV that this engine computes.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False


class GenerationBody(RequestModel):
    """Fields that completions and chat completions share. ``None`` always means the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | LongList[str] | None = None
    stop_token_ids: LongList[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LongDict[float] | None = None
    allowed_token_ids: LongList[int] | None = None
    bad_words: LongList[str] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_speculation: bool | None = None
    kv_transfer_params: KVTransferParams | None = None
    user: str | None = None

    prompt_field: ClassVar[str] = "prompt"
    """Name of the field that contains the prompt."""
    logprobs_field: ClassVar[str] = "logprobs"
    """Name of the field that contains the number of alternatives."""

    @property
    def max_tokens_field(self) -> str:
        """Name of the field that limits the output."""
        return "max_tokens"

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; None if only the context length limits it."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to return for each output token; None for no log probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to return for each prompt token; None for no log probabilities."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage and options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: str | LongList[str] | LongList[int] | LongList[LongList[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def is_echo_only(self) -> bool:
        """True if the client wants only the prompt back."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        if self.is_echo_only:
            return 1  # smallest possible output; it is not shown
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


DETAILS = ("low", "high", "auto", "original")
"""Values of an image's ``detail``."""


class ImageURL(RequestModel):
    """Image of a content part.

    Attributes:
        url: ``data:`` URL, or an address that the server may download from.
        detail: ``low`` for fewer tokens. ``high``, ``auto`` and ``original`` have the same effect as no value.
    """

    url: str
    detail: str | None = None
    _place: str | None = PrivateAttr(None)
    _is_base64: bool = PrivateAttr(False)

    @classmethod
    def placed(cls, url: str, place: str, detail: str | None = None, *, is_base64: bool = False) -> ImageURL:
        """Return the image of a request of another API.

        Args:
            url: URL, or base64 data if ``is_base64`` is True.
            place: path of the field in that request, for error messages.
        """
        image = cls(url=url, detail=detail)
        image._place, image._is_base64 = place, is_base64
        return image

    def source(self, default_place: str) -> ImageSource:
        """Return the source of the image file. ``default_place`` is the path of :attr:`url` in a chat request."""
        detail: Detail = "low" if self.detail == "low" else "high"
        return ImageSource(self.url, self._place or default_place, detail, self._is_base64)


class ContentPart(RequestModel):
    type: str
    text: str | None = None
    image_url: str | ImageURL | None = None


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | LongList[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: LongList[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(RequestModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    name: str


class NamedToolChoice(RequestModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class PredictionPart(RequestModel):
    type: Literal["text"]
    text: str


class Prediction(RequestModel):
    """Text that the output is expected to contain for the most part (predicted outputs)."""

    type: Literal["content"]
    content: str | LongList[PredictionPart]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningBody(RequestModel):
    """Settings of a chat's reasoning. The names are OpenRouter's."""

    enabled: bool | None = None
    effort: ReasoningEffort | None = None
    max_tokens: int | None = None
    exclude: bool | None = None


class ThinkingBody(RequestModel):
    """Settings of a chat's reasoning. The names are those of DeepSeek, Z.ai, Moonshot and Anthropic."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None


class ChatCompletionBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[LongList[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning: ReasoningBody | None = None
    thinking_token_budget: int | None = None
    thinking: ThinkingBody | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: LongList[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None

    prompt_field = "messages"
    logprobs_field = "top_logprobs"

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
