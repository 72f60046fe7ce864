"""What the user asked for (:class:`EngineArgs`) and what the engine runs with (:class:`EngineConfig`).

``EngineArgs`` may say "auto" (None); ``EngineConfig`` is frozen and complete. The step between the two needs
facts about the loaded model and the device, both given here as plain data, so this module imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION_BACKENDS = ("auto", "mlx", "metal")

GIB = 1 << 30


class ConfigError(ValueError):
    """A setting that cannot work. The message names the command-line flag to change."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Settings as the user gave them; ``None`` means "auto".

    Field names are the command-line flags with underscores, and mean what they mean in vLLM.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    trust_remote_code: bool = False
    generation_config: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "num_gpu_blocks_override",
            "kv_cache_memory_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} must be at least 1, got {value}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        for name, choices in (("dtype", DTYPES), ("attention_backend", ATTENTION_BACKENDS)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{flag(name)} must be one of {', '.join(choices)}, got {value!r}")


def flag(name: str) -> str:
    """The command-line flag of a field: ``max_model_len`` -> ``--max-model-len``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model that the control plane needs.

    ``kv_bytes_per_token`` counts K and V over all layers, in bytes. ``max_position_embeddings`` is the context
    length the checkpoint was trained for, in tokens. ``vocab_size`` is the number of rows of the LM head.
    ``default_sampling`` has the sampling parameters of requests that do not say, as the checkpoint recommends.
    """

    name: str
    model_type: str
    dtype: str
    vocab_size: int
    num_layers: int
    num_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_position_embeddings: int
    default_sampling: dict[str, float] = field(default_factory=dict)


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
class SchedulerConfig:
    """Limits the scheduler holds. Tokens are counted per step, sequences at any one time."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache: ``num_blocks`` blocks of ``block_size`` tokens, shared by all layers' tables."""

    block_size: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything resolved; nothing is "auto" any more."""

    model: ModelInfo
    device: DeviceInfo
    scheduler: SchedulerConfig
    cache: CacheConfig
    attention_backend: str
    seed: int


# --- from arguments to configuration ---

# A step on a CPU should take about a second at most; two laptop-class cores reach about this rate.
_CPU_FLOPS = 1.5e11
_CPU_STEP_SECONDS = 1.0
# On a CPU the pool is made of ordinary memory that other programs want too.
_CPU_POOL_BYTES = 2 * GIB
# Left free on a GPU for activations and the graph of a step.
_ACTIVATION_BYTES = GIB


def resolve_config(
    args: EngineArgs, model: ModelInfo, device: DeviceInfo, attention_backend: str
) -> EngineConfig:
    """Settle every "auto", now that model and device are known.

    Raises:
        ConfigError: the settings cannot work together; the message names the flag to change.
    """
    num_blocks = _num_blocks(args, model, device)
    cache = CacheConfig(block_size=args.block_size, num_blocks=num_blocks)
    max_model_len = _max_model_len(args, model, cache)
    max_num_seqs = args.max_num_seqs or (64 if device.kind == "cpu" else 256)
    return EngineConfig(
        model=model,
        device=device,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=args.max_num_batched_tokens or _step_budget(model, device),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        ),
        cache=cache,
        attention_backend=attention_backend,
        seed=args.seed,
    )


def _step_budget(model: ModelInfo, device: DeviceInfo) -> int:
    """Tokens per step: 2,048 on a GPU; on a CPU the power of two whose matrix products take about a second."""
    if device.kind != "cpu":
        return 2048
    tokens = _CPU_FLOPS * _CPU_STEP_SECONDS / (2 * model.num_params)
    return min(2048, max(64, 1 << int(tokens).bit_length() - 1))


def _num_blocks(args: EngineArgs, model: ModelInfo, device: DeviceInfo) -> int:
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    block_bytes = args.block_size * model.kv_bytes_per_token
    if args.kv_cache_memory_bytes is not None:
        pool_bytes, named = args.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    elif device.kind == "cpu":
        # The weights are loaded already, so what is left of the memory is what is available.
        pool_bytes, named = min(_CPU_POOL_BYTES, device.memory_bytes // 4), "--kv-cache-memory-bytes"
    else:
        budget = int(device.memory_bytes * args.gpu_memory_utilization)
        pool_bytes, named = budget - model.weight_bytes - _ACTIVATION_BYTES, "--gpu-memory-utilization"
    if pool_bytes < block_bytes:
        raise ConfigError(
            f"no memory for the KV cache: one block of {args.block_size} tokens takes {block_bytes} bytes and "
            f"{max(pool_bytes, 0)} are left beside the weights ({model.weight_bytes} bytes); raise {named}"
        )
    return pool_bytes // block_bytes


def _max_model_len(args: EngineArgs, model: ModelInfo, cache: CacheConfig) -> int:
    """As asked, or the checkpoint's context length; never more than the pool holds."""
    limit = model.max_position_embeddings
    wanted = args.max_model_len if args.max_model_len is not None else limit
    if wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the {limit} tokens that {model.name} was trained for"
        )
    if wanted <= cache.num_tokens:
        return wanted
    if args.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit into the KV cache of {cache.num_tokens} tokens; lower it or "
            f"raise --kv-cache-memory-bytes"
        )
    return cache.num_tokens
