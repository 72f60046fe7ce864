"""Request and response bodies of Ollama's API, with Ollama's names and meanings. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from metal_engine.server.json_parts import Placeholder
from metal_engine.server.protocol import LongList, RequestModel

# --- requests -----------------------------------------------------------------------------------------------


class OllamaFunction(RequestModel):
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(RequestModel):
    """A tool call. ``arguments`` is an object, not text."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: LongList[str] | None = None
    tool_calls: LongList[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(RequestModel):
    """Fields that ``/api/chat`` and ``/api/generate`` share. ``keep_alive`` has no effect: the model stays loaded."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def streams(self) -> bool:
        """True if the response is sent line by line, which is the default."""
        return self.stream is not False


class OllamaChatBody(OllamaBody):
    """Body of ``POST /api/chat``. A request without messages only loads the model."""

    messages: LongList[OllamaMessage] | None = None
    tools: LongList[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody):
    """Body of ``POST /api/generate``. A request with neither a prompt nor a suffix only loads the model."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: LongList[int] | None = None
    images: LongList[str] | None = None


class OllamaEmbedBody(RequestModel):
    """Body of ``POST /api/embed``. ``truncate``, ``options`` and ``keep_alive`` have no effect.

    Inputs are never truncated.
    """

    model: str | None = None
    input: str | LongList[str] | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsBody(RequestModel):
    """Body of ``POST /api/embeddings``, which takes one prompt, for older clients."""

    model: str | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaShowBody(RequestModel):
    """Body of ``POST /api/show``. Older clients send the model as ``name``."""

    model: str | None = None
    name: str | None = None


# --- answers ------------------------------------------------------------------------------------------------


def _is_none(value: object) -> bool:
    return value is None


Absent = Field(default=None, exclude_if=_is_none)


class OllamaAnswer(BaseModel):
    """Full response, or one line of it. Only the last line has counts, durations and ``done_reason``."""

    model: str
    created_at: str
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | None = Absent
    total_duration: int | None = Absent
    load_duration: int | None = Absent
    prompt_eval_count: int | None = Absent
    prompt_eval_duration: int | None = Absent
    eval_count: int | None = Absent
    eval_duration: int | None = Absent


class CalledFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class AnswerToolCall(BaseModel):
    id: str
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | None = Absent
    tool_calls: list[AnswerToolCall] | None = Absent


class ChatAnswer(OllamaAnswer):
    """Response of ``/api/chat``."""

    message: AnswerMessage


class GenerateAnswer(OllamaAnswer):
    """Response of ``/api/generate``."""

    response: str = ""
    thinking: str | None = Absent


class EmbedAnswer(BaseModel):
    """Response of ``/api/embed``, with one vector for each input. A single empty input has no vector."""

    model: str
    embeddings: list[list[float]] | SkipJsonSchema[Placeholder]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsAnswer(BaseModel):
    """Response of ``/api/embeddings``."""

    embedding: list[float] | SkipJsonSchema[Placeholder]


class ModelDetails(BaseModel):
    parent_model: str = ""
    format: str = "mlx"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    """One name of a model.

    ``digest`` is a hash of the name and size. ``modified_at`` is the start time of the server.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class Tags(BaseModel):
    models: list[ListedModel]


class RunningModel(BaseModel):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class PsResponse(BaseModel):
    models: list[RunningModel]


class Shown(BaseModel):
    """Response of ``/api/show``.

    ``parameters`` are the sampling parameters that the checkpoint recommends. ``template`` is its chat template.
    """

    model_config = ConfigDict(protected_namespaces=())

    modelfile: str = ""
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    version: str


class OllamaError(BaseModel):
    error: Annotated[str, Field(min_length=1)]
