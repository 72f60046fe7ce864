"""What the user asked for (:class:`EngineArgs`) and what the engine runs with (:class:`EngineConfig`).

``EngineArgs`` may say "auto" (None); ``EngineConfig`` is frozen and complete. The step between the two needs
facts about the loaded model and the device, both given here as plain data, so this module imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
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
