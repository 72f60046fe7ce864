"""Messages between a server and the process of its engine, encoded as msgpack arrays. Nothing is pickled.

The server works on text, and the engine on token ids. A message therefore contains only the parts of a request that the
engine reads. ``packed_requests.py`` and ``packed_results.py`` convert to messages and back.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from metal_engine.engine.step_observer import Frame
from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import BidirectionalLayers
from metal_engine.request import RequestOptions
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import DeviceInfo, EngineConfig

# Signal at which the process of an engine writes the stacks of its threads to its standard error.
DUMP_SIGNAL = signal.SIGUSR1


class WireError(Exception):
    """Raised for a message that is malformed, too large or out of turn. The connection cannot be used after it."""


class Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Base class of all messages."""


class Part(msgspec.Struct, array_like=True, gc=False):
    """Base class of parts of messages."""


# --- parts ---

Logprobs = tuple[int, float, int, tuple[tuple[int, float], ...]]  # fields of TokenLogprobs


class Sampling(Part):
    """The part of :class:`metal_engine.sampling_params.SamplingParams` that the engine reads.

    Parameters that become :class:`PackedRules` are reduced to flags: the engine reads only whether they are set.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    stop_token_ids: bytes
    has_stop: bool
    has_bad_words: bool
    has_biases: bool
    has_allowed: bool
    is_structured: bool
    has_phase_rules: bool


class PackedRules(Part):
    """:class:`metal_engine.token_rules.TokenRules` with its arrays as bytes.

    ``grammar`` is the number of the :class:`MakeGrammar` call that made the grammar; None without a grammar.
    """

    stop_token_ids: bytes
    bad_words: list[tuple[tuple[int, ...], list[int]]]
    allowed: bytes | None
    bias_ids: bytes
    biases: bytes
    grammar: int | None


class Array(Part):
    """A NumPy array of numbers. ``dtype`` is the ``str`` attribute of its NumPy type."""

    dtype: str
    shape: list[int]
    data: bytes


class Image(Part):
    """:class:`metal_engine.prompt_images.PromptImage`.

    ``positions`` are int32. ``key`` is the key of the image's :class:`ImageInputs`.
    """

    positions: bytes
    content_hash: bytes
    key: int
    bidirectional_layers: BidirectionalLayers


class Images(Part):
    """:class:`metal_engine.prompt_images.PromptImages`.

    ``axes`` holds the fields of :class:`metal_engine.prompt_images.AxesPositions`: ``prompt`` as int32, and ``delta``.
    """

    images: list[Image]
    axes: tuple[bytes, int] | None


class Output(Part):
    """The part of :class:`metal_engine.request.RequestOutput` that the engine fills in."""

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_predicted_tokens: tuple[int, int] = (0, 0)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    caused_by_request: bool = False
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    pooled: bytes | None = None


class LoadedAdapter(Part):
    """:class:`metal_engine.lora_adapter.Adapter`. Its slot is taken until the server releases the adapter."""

    name: str
    path: str
    slot: int
    rank: int
    fingerprint: str
    base_model_name: str | None


class MetricsSnapshot(Part):
    """Attributes of :class:`metal_engine.engine.metrics.EngineMetrics` by name, grouped by their types."""

    counts: dict[str, int | float]
    by_label: dict[str, dict[str, int]]
    by_position: dict[str, list[int]]
    histograms: dict[str, tuple[list[int], float]]
    replay_refusal: str | None
    kv_transfer: dict[str, int] | None


# --- to the engine ---


class Start(Message):
    """First message to a process, with its settings. The process then imports its modules.

    ``models`` contains the settings of all models of the server. The process builds the engine of one of these models.
    """

    models: list[dict[str, Any]]
    log_level: str
    log_format: str


class Build(Message):
    """Builds the engine with the settings ``args``.

    ``config`` is the configuration of an earlier process of this engine; None for the first process. ``memory_bytes``
    is the memory for all models together; None if the engine has the whole device.
    """

    args: dict[str, Any]
    config: EngineConfig | None
    memory_bytes: int | None


class Granted(Message):
    """Grants the memory of a :class:`Claim`."""


class Submit(Message):
    request_id: str
    prompt: bytes
    sampling: Sampling
    max_tokens: int
    rules: PackedRules
    seed: int
    options: RequestOptions | None
    eos_token_ids: list[int]
    cache_salt: bytes
    block_hashes: list[bytes]
    pooling_params: PoolingParams | None
    num_lasting_tokens: int
    num_instruction_tokens: int
    adapter: int | None
    images: Images | None
    so_far: Output | None
    num_failures: int


class ImageInputs(Message):
    """Inputs of the encoder for an image. Later requests refer to them by ``key``, until the server releases it."""

    key: int
    inputs: dict[str, Array]


class End(Message):
    request_id: str
    finish_reason: str
    num_output_tokens: int | None


class Watch(Message):
    """Turns frames on, or off if ``number`` is None. Each :class:`FrameOf` repeats the number."""

    number: int | None


class Call(Message):
    """Base class of messages that get a :class:`Reply`."""

    call: int


class MakeGrammar(Call):
    """Make a grammar, which has the number of the call as its key. ``structured`` and ``phases`` are JSON.

    ``was_made`` is True if an earlier process has made the grammar.
    """

    structured: bytes | None
    phases: bytes | None
    stop_token_ids: bytes
    was_made: bool = False


class LoadAdapter(Call):
    """Load a LoRA adapter, which has the number of the call as its key.

    Adapters that are loaded at the start have their negative slots as keys. ``fingerprint`` is the fingerprint of an
    adapter that an earlier process had.
    """

    name: bytes
    path: bytes
    within: bytes | None
    in_place: bool
    fingerprint: str | None = None


class UnloadAdapter(Message):
    name: bytes


class Release(Message):
    """Releases grammars, adapters and inputs of images by key, even while a grammar or an adapter is being made."""

    grammars: list[int]
    adapters: list[int]
    images: list[int]


class ReleaseMemory(Message):
    """Frees the KV cache of an idle engine."""


class Shutdown(Message):
    """Ends the process after the step in flight."""


# --- from the engine ---


class Reply(Message):
    """Result of the :class:`Call` with this number. ``error`` is a result of ``packed_error``; None after a success."""

    call: int
    adapter: LoadedAdapter | None = None
    error: list[str | None] | None = None


class Device(Message):
    """The process has imported its modules. ``info`` describes the device on which the engine will run."""

    info: DeviceInfo


class CheckFits(Message):
    """See :meth:`metal_engine.engine.device_access.DeviceAccess.check_fits`. If it raises, the process is killed."""

    num_bytes: int


class Claim(Message):
    """See :meth:`metal_engine.engine.device_access.DeviceAccess.claim`.

    The server answers with :class:`Granted`, or ends the process.
    """

    num_bytes: int
    loading_bytes: int
    step_bytes: int | None


class Refused(Message):
    """The engine cannot be built. ``error`` is a result of ``packed_error``."""

    error: list[str | None]


class Outputs(Message):
    outputs: list[Output]
    stats: SchedulerStats


class Computing(Message):
    """Requests of the next step. Sent before the step, unless the previous step had the same requests."""

    request_ids: list[str]


class Numbers(Message):
    stats: SchedulerStats
    metrics: MetricsSnapshot


class Ready(Message):
    """The model is loaded. ``adapters`` is None without LoRA support."""

    numbers: Numbers
    config: EngineConfig
    eos_token_ids: list[int]
    tokenizer_path: str | None
    adapters: list[LoadedAdapter] | None


class FrameOf(Message):
    watch: int
    frame: Frame


class Ended(Message):
    """The engine has ended. ``message`` is the reason, as clients receive it."""

    message: str


ToEngine = (
    Start
    | Build
    | Granted
    | ImageInputs
    | Submit
    | End
    | Watch
    | MakeGrammar
    | LoadAdapter
    | UnloadAdapter
    | Release
    | ReleaseMemory
    | Shutdown
)
FromEngine = Device | CheckFits | Claim | Ready | Reply | Refused | Outputs | Computing | Numbers | FrameOf | Ended

encode = msgspec.msgpack.Encoder().encode
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


_INVALID = (
    msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, MemoryError
)  # fmt: skip


@contextmanager
def checked() -> Iterator[None]:
    """Within this context, convert the errors that an invalid message causes to a WireError."""
    try:
        yield
    except _INVALID as error:
        raise WireError(f"an invalid message: {type(error).__name__}: {error}") from error


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message of the server. Raises WireError."""
    with checked():
        return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Decode a message of the engine's process. Raises WireError."""
    with checked():
        return _from_engine.decode(data)
