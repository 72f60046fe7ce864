"""What the engine runs with: plain data, nothing "auto" any more. :mod:`metal_engine.settings.resolve` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from metal_engine.settings.args import GIB

# Left free on a GPU beside what was measured: for the allocator's rounding up, and attention over longer contexts.
MARGIN_BYTES = GIB // 4
# What :attr:`EngineConfig.replay` is where decode steps are replayed.
REPLAYS = "on"
# Why a model's decode steps are not.
NO_REPLAY_WITHOUT_KERNEL = "the kernel does not compute all of its attention"
# Recurrent states of a request that a step has at hand beside its slots: what it goes on from, what it leaves, and a
# copy on the way to another order of the requests.
IN_FLIGHT_STATES = 3
# And with drafts: what was before them, on its way to its slot; what rejected ones have left; and, where verifications
# are replayed, what each request leaves by itself before a trace gives it back as one array.
IN_FLIGHT_STATES_OF_DRAFTS = 3


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How a checkpoint wants its hidden states to be pooled; by default as vLLM pools those of a chat model.

    Attributes:
        pooling_type: ``LAST``, ``MEAN`` or ``CLS`` (:class:`metal_engine.pooling_params.PoolingParams`).
        normalize: whether vectors are scaled to length 1.
        is_embedder: whether the checkpoint says that it is an embedding model.
        matryoshka_dimensions: the only lengths that vectors may be cut to, beside their own; none: any.
        problem: why vectors of this checkpoint cannot be computed here; None if they can be.
    """

    pooling_type: str = "LAST"
    normalize: bool = True
    is_embedder: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class RerankerConfig:
    """How a checkpoint scores a document: the logits of two tokens after a prompt that asks whether it answers a query.

    The prompt is ``prefix``, then ``pair`` with ``{instruction}``, ``{query}`` and ``{document}`` in it, then
    ``suffix``; each is tokenized by itself. Token ids are those of the answers yes and no.
    """

    true_token_id: int
    false_token_id: int
    prefix: str
    pair: str
    suffix: str
    instruction: str


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model that the control plane needs.

    ``kv_bytes_per_token`` counts K and V over all layers, in bytes; ``state_bytes_per_request`` recurrent states, which
    are of one size however long a request is. ``layer_width`` counts the numbers that the widest module of a layer
    makes of a token, experts together. ``kv_dtype`` says in what K and V are kept, as ``bfloat16`` or ``int8``;
    ``unquantized_kv_bytes_per_token`` what they would take if they were not quantized, None if they are not.
    ``max_position_embeddings`` is the context length the checkpoint was trained for, in tokens, if it says.
    ``vocab_size`` is the number of rows of the LM head.
    ``num_heads`` counts the query heads of a layer.
    ``default_sampling`` has the sampling parameters that the checkpoint recommends, for requests that give none.
    ``hidden_size`` is the length of a hidden state, 0 if the configuration does not say. ``reranker`` is None for
    models that are none. ``can_generate`` is false for checkpoints without an LM head. ``adapter_bytes`` is the memory
    of all adapters that there may be at once.
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
    max_position_embeddings: int | None
    num_heads: int = 1
    head_dim: int = 1
    default_sampling: dict[str, float] = field(default_factory=dict)
    hidden_size: int = 0
    layer_width: int = 0
    pooler: PoolerConfig = PoolerConfig()
    reranker: RerankerConfig | None = None
    can_generate: bool = True
    adapter_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Facts about the device, in bytes where they are sizes.

    ``memory_bytes`` is what a process may use: the recommended working set on Metal, available RAM on a CPU.
    ``compute`` names what does the matrix products (a GPU, or a BLAS library).
    """

    kind: str  # "metal" | "cpu"
    name: str
    compute: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are proposed. Names and meanings are vLLM's.

    Attributes:
        method: ``ngram``: what followed the last tokens where they stood before, in the prompt or the output.
            ``draft_model``: what a smaller model says.
        num_speculative_tokens: drafts of a request in a step, at most.
        prompt_lookup_max: last tokens that are compared.
        prompt_lookup_min: of them, those that must agree.
        model: the draft model.
        revision: of it, on the hub.
        max_draft_len: tokens of a request, drafts among them, that the draft model was trained for; None: any.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int
    model: str | None = None
    revision: str | None = None
    max_draft_len: int | None = None


# Rows that sample in a step of few requests with drafts: the logits of one are as large as the vocabulary.
_MAX_ROWS_WITH_DRAFTS = 64


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits the scheduler holds. Tokens are counted per step, sequences at any one time.

    docs/tuning.md says what those after ``max_model_len`` do; by their defaults here they limit nothing.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 1 << 62  # a prompt with more tokens left than this is long
    page_aligned_scheduling: bool = False
    scheduling_policy: str = "fcfs"
    max_attention_work: int = 1 << 62  # (query row, visible key) pairs of a step
    async_scheduling: bool = False  # a step is planned before the tokens of the one before it are known
    speculative: SpeculativeConfig | None = None  # tokens are proposed, and computed before they are sampled

    @property
    def max_sample_rows(self) -> int:
        """Rows of a step that sample, at most."""
        if self.speculative is None:
            return self.max_num_seqs
        num_rows = self.max_num_seqs * (1 + self.speculative.num_speculative_tokens)
        return min(num_rows, max(self.max_num_seqs, _MAX_ROWS_WITH_DRAFTS), self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache: ``num_blocks`` blocks of ``block_size`` tokens, shared by all layers' tables.

    ``model_fingerprint`` names what K and V depend on besides tokens: cached prefixes are found under it.
    ``num_state_slots`` counts recurrent states, of requests and of checkpoints; 0 for models without.
    ``kv_room_bytes`` is the memory there was for the blocks, which take less by a part of one; 0 where they are given.
    ``num_padding_blocks`` more blocks, behind the others, are no request's: replayed decode steps write there what
    their padding computes. With 0 no step is replayed. They are in the memory there was, too.
    """

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = False
    model_fingerprint: str = ""
    num_state_slots: int = 0
    kv_room_bytes: int = 0
    num_padding_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """How many layers' attention our Metal kernel computes, and how many MLX's operations do, the portable path.

    ``not_covered`` says what it is about layers that keeps them from the kernel where others, or none, have it; empty
    where nobody asked for it.

    ``tuning`` describes the choices of attention tuning; empty without tuning. ``tuned`` has a name for each choice
    other than the default.
    """

    metal: int = 0
    portable: int = 0
    not_covered: tuple[str, ...] = ()
    tuning: str = ""
    tuned: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandBufferLimits:
    """What a command buffer of Metal's may have before MLX commits it: kernels, and elements of arrays in 2**20.

    None: as many as MLX has it by itself.
    """

    max_ops: int | None
    max_mb: int | None

    def __str__(self) -> str:
        ops = "MLX's own number of" if self.max_ops is None else self.max_ops
        mb = "MLX's own number of" if self.max_mb is None else f"{self.max_mb:,}"
        return f"up to {ops} operations and {mb} MB"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank of an engine: the machine it is on, and its share of the model.

    Attributes:
        host: the machine's name.
        weight_bytes: of its weights; ``peak_bytes`` what MLX held at most while they were read.
        num_layers: that it computes, or has a share of.
    """

    host: str
    weight_bytes: int
    peak_bytes: int
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything resolved; nothing is "auto" any more.

    Where several ranks share the model, its sizes are those of the rank that has most; ``ranks`` says more.
    """

    model: ModelInfo
    device: DeviceInfo
    scheduler: SchedulerConfig
    cache: CacheConfig
    attention_backend: str
    seed: int
    attention_layers: AttentionLayers = AttentionLayers()
    step_bytes: int = 0  # what the largest step takes besides weights and KV cache, measured
    draft: ModelInfo | None = None  # the model that proposes tokens
    command_buffers: CommandBufferLimits | None = None  # None: MLX's own, or no Metal
    kv_role: str | None = None  # what the engine does with a KV store, as vLLM calls it; None without one
    ranks: tuple[RankInfo, ...] = ()  # that share the model; none where there is one
    dispatch: str = ""  # with --async-scheduling: when the device is given a step, in words
    wire_memory: bool = True  # --wire-memory
    replay: str = "off"  # whether decode steps are replayed: REPLAYS, or "off", with why where they cannot be

    @property
    def weight_bytes(self) -> int:
        """Of the model, and of its draft model."""
        return self.model.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)

    @property
    def saves_kv(self) -> bool:
        """Whether KV goes to a store."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def attention(self) -> str:
        """What computes attention, in words."""
        layers = self.attention_layers
        if not layers.not_covered:
            return self.attention_backend
        total, why = layers.metal + layers.portable, ", ".join(layers.not_covered)
        return f"{self.attention_backend}; portable for {layers.portable} of {total} layers ({why})"

    @property
    def attention_tuning(self) -> str:
        """The choices of attention tuning, in words. Empty without tuning."""
        return self.attention_layers.tuning

    @property
    def kv_bytes(self) -> int:
        padding_bytes = self.cache.num_padding_blocks * self.cache.block_size * self.model.kv_bytes_per_token
        return self._request_kv_bytes + padding_bytes

    @property
    def _request_kv_bytes(self) -> int:
        draft_bytes = 0 if self.draft is None else self.draft.kv_bytes_per_token
        return self.cache.num_tokens * (self.model.kv_bytes_per_token + draft_bytes)

    @property
    def num_tokens_unquantized(self) -> int | None:
        """Tokens that the KV cache would hold if it were not quantized; None where it is not."""
        models = [self.model] if self.draft is None else [self.model, self.draft]
        if all(model.unquantized_kv_bytes_per_token is None for model in models):
            return None
        bytes_per_token = sum(model.unquantized_kv_bytes_per_token or model.kv_bytes_per_token for model in models)
        cache = self.cache
        if not cache.kv_room_bytes:
            return self._request_kv_bytes // (bytes_per_token * cache.block_size) * cache.block_size
        num_blocks = cache.kv_room_bytes // (bytes_per_token * cache.block_size)
        return max(0, num_blocks - cache.num_padding_blocks) * cache.block_size

    @property
    def state_bytes(self) -> int:
        """Recurrent states: in their slots, and at hand in a step."""
        if not self.cache.num_state_slots:
            return 0
        num_in_flight = IN_FLIGHT_STATES
        if self.scheduler.speculative is not None:
            num_in_flight += IN_FLIGHT_STATES_OF_DRAFTS
        num_states = 1 + self.cache.num_state_slots + num_in_flight * self.scheduler.max_num_seqs
        return num_states * self.model.state_bytes_per_request

    @property
    def peak_bytes(self) -> int:
        """What MLX holds at most: weights, adapters, KV cache, recurrent states and the largest step."""
        weights = self.weight_bytes + self.model.adapter_bytes
        return weights + self.kv_bytes + self.state_bytes + self.step_bytes
