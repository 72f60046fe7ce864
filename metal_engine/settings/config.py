"""Resolved configuration of the engine: plain data, without "auto". :mod:`metal_engine.settings.resolve` creates it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from metal_engine.prompt_images import BidirectionalLayers
from metal_engine.settings.args import GIB

# Memory that stays free on a GPU for allocator rounding and for attention over longer contexts than measured.
MARGIN_BYTES = GIB // 4
# Value of :attr:`EngineConfig.replay` if decode steps are replayed.
REPLAYS = "on"
# Way in which requests run if :attr:`ModelInfo.own_caches_reason` is set.
OWN_CACHES = "one after another over mlx-lm's own caches, without a prefix cache"
# Reasons why a model's decode steps are not replayed.
NO_REPLAY_WITHOUT_KERNEL = "the kernel does not compute all of its attention"
NO_REPLAY_WITH_INDEX = "its layers attend to keys that an index selects"
# Number of recurrent states that a step holds for each request, in addition to its slots: the initial state, the final
# state, and a copy for reordering requests.
IN_FLIGHT_STATES = 3
# Additional states with drafts: the state before the drafts, on its way to its slot; the state after rejected drafts;
# and, if verifications are replayed, each request's output state before a trace returns all of them as one array.
IN_FLIGHT_STATES_OF_DRAFTS = 3


# Reason to refuse images if the model has no image encoder.
TEXT_ONLY = "the model takes text only"


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """Pooling of hidden states as the checkpoint demands it. The default is vLLM's pooling for chat models.

    Attributes:
        pooling_type: ``LAST``, ``MEAN`` or ``CLS`` (:class:`metal_engine.pooling_params.PoolingParams`).
        normalize: True if vectors are scaled to length 1.
        is_embedder: True if the checkpoint declares itself an embedding model.
        matryoshka_dimensions: allowed lengths of truncated vectors. An empty tuple allows any length.
        problem: reason why vectors of this checkpoint are not supported; None for no problem.
    """

    pooling_type: str = "LAST"
    normalize: bool = True
    is_embedder: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class RerankerConfig:
    """Scoring of a document by a reranker: the logits of two tokens after a prompt about a query and the document.

    The prompt consists of ``prefix``, of ``pair`` with ``{instruction}``, ``{query}`` and ``{document}`` filled in, and
    of ``suffix``. Each part is tokenized separately. The two token ids stand for the answers yes and no.
    """

    true_token_id: int
    false_token_id: int
    prefix: str
    pair: str
    suffix: str
    instruction: str


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Processing of images for a model that takes images, read from the checkpoint.

    Attributes:
        family: ``model_type`` of the checkpoint, or a name for checkpoints that share their image processing.
        image_token_id: id of the image token. The prompt has one per feature.
        placeholder_token_id: id of the token that a chat template writes for an image; None for the image token.
        processor: fields of the checkpoint's image processor, with ``--mm-processor-kwargs`` applied.
        patch_size: side of a patch of the image encoder in pixels.
        merge_size: number of patches per side that are merged into one feature.
        num_features: constant number of features of an image or of each tile; 0 if it varies.
        max_image_tokens: maximum number of tokens of an image, if the image processor supports a limit; None for the
            checkpoint's own limit.
        least_image_tokens: number of tokens of the smallest image that the image processor makes; 0 if unknown.
        most_image_tokens: number of tokens of the largest image that the image processor makes; 0 if unknown.
        bidirectional_layers: layers in which an image's tokens attend to each other
            (:class:`metal_engine.prompt_images.PromptImage`). A step computes such an image as a whole.
    """

    family: str
    image_token_id: int
    placeholder_token_id: int | None = None
    processor: dict[str, Any] = field(default_factory=dict)
    patch_size: int = 14
    merge_size: int = 1
    num_features: int = 0
    max_image_tokens: int | None = None
    least_image_tokens: int = 0
    most_image_tokens: int = 0
    bidirectional_layers: BidirectionalLayers = ""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model that the control plane needs.

    Attributes:
        vocab_size: number of rows of the LM head.
        num_layers: number of layers with a state, such as K and V.
        kv_bytes_per_token: size of K and V of a token over all layers, in bytes.
        kv_dtype: type in which K and V are stored, such as ``bfloat16`` or ``int8``.
        unquantized_kv_bytes_per_token: ``kv_bytes_per_token`` if K and V were not quantized; None if they are not
            quantized.
        state_bytes_per_request: size of a request's recurrent states in bytes, independent of its length.
        has_index: True if a layer attends only to the keys that an index selects.
        own_caches_reason: reason why the requests of a step run one after another over mlx-lm's own caches; empty if
            they are packed.
        max_position_embeddings: context length for which the checkpoint was trained, in tokens, if known.
        num_heads: number of query heads of a layer.
        default_sampling: recommended sampling parameters of the checkpoint, for requests without parameters.
        hidden_size: length of a hidden state; 0 if the configuration does not contain it.
        layer_width: number of elements that the widest module of a layer computes for a token, summed over experts.
        reranker: configuration of a reranker; None for other models.
        can_generate: False for checkpoints without an LM head.
        adapter_bytes: memory for the maximum number of LoRA adapters, in bytes.
        feature_bytes: size of the features of an image token in bytes; 0 without images.
        image_refusal: reason why prompts with images are refused; None if they are accepted.
        vision: processing of images; None for an unsupported family.
    """

    name: str
    model_type: str
    dtype: str
    vocab_size: int
    num_layers: int
    num_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_dtype: str = "auto"
    unquantized_kv_bytes_per_token: int | None = None
    state_bytes_per_request: int = 0
    has_index: bool = False
    own_caches_reason: str = ""
    max_position_embeddings: int | None
    num_heads: int = 1
    head_dim: int = 1
    default_sampling: dict[str, int | float] = field(default_factory=dict)
    hidden_size: int = 0
    layer_width: int = 0
    pooler: PoolerConfig = PoolerConfig()
    reranker: RerankerConfig | None = None
    can_generate: bool = True
    adapter_bytes: int = 0
    feature_bytes: int = 0
    image_refusal: str | None = TEXT_ONLY
    vision: VisionConfig | None = None

    @property
    def images(self) -> str:
        """``accepted`` if prompts may have images, otherwise ``refused``, with the reason."""
        return "accepted" if self.image_refusal is None else f"refused: {self.image_refusal}"


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Facts about the device. Sizes are in bytes.

    Attributes:
        compute: name of the GPU or BLAS library that computes matrix products.
        memory_bytes: memory that a process may use: the recommended working set on Metal, available RAM on a CPU.
    """

    kind: str  # "metal" | "cpu"
    name: str
    compute: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculation. Names and meanings are vLLM's.

    Attributes:
        method: ``ngram`` proposes the tokens that followed an earlier occurrence of the last tokens, in the prompt or
            output. ``draft_model`` proposes the tokens of a smaller model. ``mtp`` proposes the tokens of the model's
            draft head, or of ``ngram`` while these are accepted at least as often. ``auto`` stands for ``mtp`` if there
            is a usable draft head, otherwise for ``ngram``. An engine's configuration has the chosen method.
        num_speculative_tokens: maximum number of drafts of a request in a step.
        prompt_lookup_max: maximum number of last tokens to compare.
        prompt_lookup_min: minimum number of last tokens that must match.
        model: name of the draft model; repository, file or folder of the draft head, or None if the head is among the
            model's files.
        revision: revision of ``model`` on the hub.
        max_draft_len: context length of the draft model in tokens, including drafts; None for no limit.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int
    model: str | None = None
    revision: str | None = None
    max_draft_len: int | None = None


# Maximum number of sampling rows in a step with drafts and few requests. Each row has a logit for every token of
# the vocabulary.
_MAX_ROWS_WITH_DRAFTS = 64


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler. Token limits apply to a step, sequence limits to any point in time.

    docs/tuning.md describes the fields after ``max_model_len``. By default, one prompt at a time may be prefilled in
    parts, and attention work is not limited.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 1 << 62  # a prompt is long if more tokens than this are left
    page_aligned_scheduling: bool = False
    scheduling_policy: str = "fcfs"
    max_attention_work: int = 1 << 62  # maximum number of (query row, visible key) pairs in a step
    async_scheduling: bool = False  # plan a step before the tokens of the previous step are known
    speculative: SpeculativeConfig | None = None  # settings of speculation; None without it
    max_num_encoder_tokens: int = 0  # maximum number of image tokens that a step encodes, and that an image has
    image_cache_tokens: int = 0  # maximum number of image tokens whose features are kept

    def room_for_image(self, block_size: int) -> int:
        """Return the number of an image's tokens that fit into a step if each other request gets one token.

        The result may be zero or negative.
        """
        # With page alignment, a part of the first and of the last block of the image cannot be used.
        edges = 2 * (block_size - 1) if self.page_aligned_scheduling else 0
        return self.max_num_batched_tokens - (self.max_num_seqs - 1) - edges

    @property
    def max_sample_rows(self) -> int:
        """Maximum number of rows of a step that sample. A request has a row for its next token and for each draft."""
        if self.speculative is None:
            return self.max_num_seqs
        num_rows = self.max_num_seqs * (1 + self.speculative.num_speculative_tokens)
        return min(num_rows, max(self.max_num_seqs, _MAX_ROWS_WITH_DRAFTS), self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Paged KV cache: ``num_blocks`` blocks of ``block_size`` tokens. All layers use the same block tables.

    Attributes:
        model_fingerprint: identifier of everything besides tokens that K and V depend on. Part of the keys of cached
            prefixes.
        num_state_slots: number of slots for recurrent states of requests and of state checkpoints; 0 for models
            without recurrent layers.
        kv_available_bytes: memory available for the blocks in bytes, including an unused rest; 0 if ``num_blocks`` was
            given.
        num_padding_blocks: number of padding blocks after the other blocks, within the same memory. Replayed decode
            steps write the KV of padding rows there. If it is 0, no step is replayed.
    """

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = False
    model_fingerprint: str = ""
    num_state_slots: int = 0
    kv_available_bytes: int = 0
    num_padding_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """Numbers of layers by the code that computes their attention.

    Attributes:
        metal: number of layers whose attention our Metal kernel computes.
        portable: number of layers whose attention MLX's operations compute.
        not_covered: reasons why some layers do not use the kernel. Empty if all layers use the kernel, or the kernel
            was not requested.
        tuning: description of the choices of attention tuning; empty without tuning.
        tuned: names of the choices that differ from the default.
        tensor_ops: state of Metal's tensor operations with the reason; empty if the GPU lacks them.
        no_index_kernels: reason why MLX's operations select the keys of an index; empty if the kernels do, or if no
            layer has an index.
    """

    metal: int = 0
    portable: int = 0
    not_covered: tuple[str, ...] = ()
    tuning: str = ""
    tuned: tuple[str, ...] = ()
    tensor_ops: str = ""
    no_index_kernels: str = ""


@dataclass(frozen=True)
class CommandBufferLimits:
    """Limits on a Metal command buffer. MLX commits a buffer that exceeds one of them.

    Attributes:
        max_ops: number of kernels; None for MLX's own limit.
        max_mb: number of array elements, in units of 2**20, although the name says megabytes; None for MLX's own limit.
    """

    max_ops: int | None
    max_mb: int | None

    def __str__(self) -> str:
        ops = "MLX's own number of" if self.max_ops is None else self.max_ops
        mb = "MLX's own number of" if self.max_mb is None else f"{self.max_mb:,}"
        return f"up to {ops} operations and {mb} MB"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank of an engine: its host, and its shard of the model.

    Attributes:
        host: host name.
        weight_bytes: size of the rank's weights in bytes.
        peak_bytes: peak memory of MLX while the weights were loaded, in bytes.
        num_layers: number of layers of which the rank computes all or a part.
    """

    host: str
    weight_bytes: int
    peak_bytes: int
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Complete configuration, without "auto".

    If several ranks share the model, sizes are the maximum over all ranks. ``ranks`` has the sizes of each rank.
    """

    model: ModelInfo
    device: DeviceInfo
    scheduler: SchedulerConfig
    cache: CacheConfig
    attention_backend: str
    seed: int
    attention_layers: AttentionLayers = AttentionLayers()
    step_bytes: int = 0  # measured memory of the largest step in addition to weights and KV cache
    image_bytes: int = 0  # memory for encoding the largest image, and for the kept features of images
    step_seconds: float = field(default=0.0, compare=False)  # measured time of the largest step without a context
    # measured time of the model's check and its largest step, which compile kernels
    warm_up_seconds: float = field(default=0.0, compare=False)
    draft: ModelInfo | None = None  # draft model or draft head for speculation
    head_refusal: str | None = None  # reason why the draft head is not used with the method "auto"
    command_buffers: CommandBufferLimits | None = None  # None for MLX's own limits, or without Metal
    kv_role: str | None = None  # vLLM's name of the engine's role with a KV store; None without a store
    ranks: tuple[RankInfo, ...] = ()  # ranks that share the model; empty without distribution
    dispatch: str = ""  # description of the dispatch mode with --async-scheduling, with its reason
    wire_memory: bool = True  # --wire-memory
    replay: str = "off"  # REPLAYS if decode steps are replayed, or "off", with the reason if replay is impossible

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of the model and its draft model, in bytes."""
        return self.model.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)

    @property
    def requests(self) -> str:
        """``packed`` if requests share packed steps. Otherwise ``OWN_CACHES``, with the reason."""
        return f"{OWN_CACHES}: {self.model.own_caches_reason}" if self.model.own_caches_reason else "packed"

    @property
    def speculation(self) -> str | None:
        """Source of drafts, with the reason if a draft head is not used; None without speculation."""
        config = self.scheduler.speculative
        if config is None or (self.draft is None and self.head_refusal is None):
            return None if config is None else config.method
        return f"{config.method}: {self.head_refusal if self.draft is None else self.draft.name}"

    @property
    def saves_kv(self) -> bool:
        """True if the engine saves KV to a store."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def attention(self) -> str:
        """Description of the backend that computes attention, e.g. ``metal; portable for 2 of 30 layers (REASON)``."""
        layers = self.attention_layers
        described = self.attention_backend
        if layers.not_covered:
            total, why = layers.metal + layers.portable, ", ".join(layers.not_covered)
            described += f"; portable for {layers.portable} of {total} layers ({why})"
        if layers.no_index_kernels:
            described += f"; portable for selected keys ({layers.no_index_kernels})"
        return described

    @property
    def attention_tuning(self) -> str:
        """Description of the choices of attention tuning. Empty without tuning."""
        return self.attention_layers.tuning

    @property
    def kv_bytes(self) -> int:
        """Size of the blocks of the KV cache in bytes, with the padding blocks and the draft model's KV."""
        padding_bytes = self.cache.num_padding_blocks * self.cache.block_size * self.model.kv_bytes_per_token
        return self._request_kv_bytes + padding_bytes

    @property
    def _request_kv_bytes(self) -> int:
        draft_bytes = 0 if self.draft is None else self.draft.kv_bytes_per_token
        return self.cache.num_tokens * (self.model.kv_bytes_per_token + draft_bytes)

    @property
    def num_tokens_unquantized(self) -> int | None:
        """Number of tokens that a quantized KV cache would hold without quantization; None for other caches."""
        models = [self.model] if self.draft is None else [self.model, self.draft]
        if all(model.unquantized_kv_bytes_per_token is None for model in models):
            return None
        bytes_per_token = sum(model.unquantized_kv_bytes_per_token or model.kv_bytes_per_token for model in models)
        cache = self.cache
        if not cache.kv_available_bytes:
            return self._request_kv_bytes // (bytes_per_token * cache.block_size) * cache.block_size
        num_blocks = cache.kv_available_bytes // (bytes_per_token * cache.block_size)
        return max(0, num_blocks - cache.num_padding_blocks) * cache.block_size

    @property
    def state_bytes(self) -> int:
        """Size of the recurrent states, in their slots and during a step, in bytes."""
        if not self.cache.num_state_slots:
            return 0
        num_in_flight = IN_FLIGHT_STATES
        if self.scheduler.speculative is not None:
            num_in_flight += IN_FLIGHT_STATES_OF_DRAFTS
        num_states = 1 + self.cache.num_state_slots + num_in_flight * self.scheduler.max_num_seqs
        return num_states * self.model.state_bytes_per_request

    @property
    def vision(self) -> VisionConfig | None:
        """The model's :class:`VisionConfig`; None if images are refused.

        Its ``max_image_tokens`` is at most the number of an image's tokens that a step can process.
        """
        vision, most = self.model.vision, self.scheduler.max_num_encoder_tokens
        if vision is not None and vision.bidirectional_layers:
            most = min(most, self.scheduler.room_for_image(self.cache.block_size))
        if vision is None or self.model.image_refusal is not None:
            return None
        own = vision.max_image_tokens
        return replace(vision, max_image_tokens=most if own is None else min(own, most))

    @property
    def peak_bytes(self) -> int:
        """Peak memory of MLX: weights, adapters, KV cache, recurrent states, images and the largest step, in bytes."""
        weights = self.weight_bytes + self.model.adapter_bytes
        return weights + self.kv_bytes + self.state_bytes + self.image_bytes + self.step_bytes
