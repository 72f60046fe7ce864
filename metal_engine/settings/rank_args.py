"""Settings of a model that several processes, called ranks, share."""

from __future__ import annotations

from math import inf
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import FILE, HELP_ALL, SettingsBase, setting

# Heading in `--help` and in docs/cli.md.
RANKS = "Several machines"
TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"

# Fields of :class:`metal_engine.settings.args.EngineArgs`.
TENSOR_PARALLEL_SIZE: Any = setting(
    1, "Ranks (processes) that share every layer (see docs/several-macs.md).", group=RANKS, ge=1, le=256
)
PIPELINE_PARALLEL_SIZE: Any = setting(
    1,
    "Ranks that each compute some layers, in sequence, so that a model can exceed one machine's memory.",
    group=RANKS,
    listing=HELP_ALL,
    ge=1,
    le=256,
)
DISTRIBUTED_TIMEOUT_SECONDS: Any = setting(
    30.0,
    "Seconds without a message after which a rank is lost and all ranks end.",
    group=RANKS,
    listing=FILE,
    gt=0,
    lt=inf,
)


class RankArgs(SettingsBase):
    """Base class with the settings of ranks. Their names and meanings are vLLM's."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    distributed_timeout_seconds: float
    speculative_config: str | None
    kv_cache_dir: str | None
    kv_transfer_config: str | None
    lora_modules: tuple[str, ...]
    enable_lora: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_ranks == 1:
            return
        if self.tensor_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise ConfigError(
                PIPELINE, f"{self.pipeline_parallel_size} does not work with {TENSOR}: remove one of the two flags"
            )
        others = {
            "--speculative-config": self.speculative_config,
            "--kv-cache-dir": self.kv_cache_dir,
            "--kv-transfer-config": self.kv_transfer_config,
            "--lora-modules": self.lora_modules,
            "--enable-lora": self.enable_lora,
        }
        for flag, value in others.items():
            self.refuse_with_ranks(flag, value)

    def refuse_with_ranks(self, flag: str, value: object) -> None:
        """Raise ConfigError if there are several ranks, and ``value`` is not empty. ``flag`` supports only one rank."""
        if value and self.num_ranks > 1:
            raise ConfigError(flag, f"does not work with {self.ranks_flag}: remove one of the two flags")

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_flag(self) -> str:
        """Flag that sets the number of ranks: ``TENSOR`` if that size is more than 1, otherwise ``PIPELINE``."""
        return TENSOR if self.tensor_parallel_size > 1 else PIPELINE
