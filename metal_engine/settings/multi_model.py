"""Settings for several models in one server, and the division of the device's memory among them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from metal_engine.errors import ConfigError
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.config import MARGIN_BYTES, DeviceInfo
from metal_engine.settings.fields import HELP_ALL, SettingsBase, format_size, setting
from metal_engine.settings.lora_args import MODULES as LORA_MODULES
from metal_engine.settings.speculative import FLAG as SPECULATIVE
from metal_engine.settings.speculative import speculative_config

# Heading in `--help` and in docs/cli.md.
MODELS = "Several models"
# Fraction of the free memory for models on a CPU, where other programs need memory too.
_CPU_SHARE = 0.75
# Fraction of the memory for all models that each model's KV cache takes; and its maximum on a CPU in bytes.
_KV_SHARE, _CPU_KV_BYTES = 1 / 8, 2 * GIB


@dataclass(frozen=True, kw_only=True)
class RegistryArgs(SettingsBase):
    """Settings of ``metal-engine serve`` for several models, which are loaded and unloaded."""

    models_dir: str | None = setting(
        None,
        "Folder of models: each folder in it with a config.json, and each .gguf file, is served under its name, "
        "and loaded on its first request.",
        group=MODELS,
    )
    models_memory: int | None = setting(
        None,
        "Memory for all loaded models: weights, KV caches and largest steps. Each model's KV cache takes "
        "--kv-cache-memory-bytes, or else an eighth of this memory (on a CPU at most 2 GiB). Default: "
        "--gpu-memory-utilization on Metal, three quarters of the free memory on a CPU.",
        group=MODELS,
        kind="size",
        ge=1,
    )
    keep_alive: float = setting(
        0.0,
        "Seconds without a request after which a model is unloaded. 0 unloads only for a model that needs the memory.",
        group=MODELS,
        listing=HELP_ALL,
        ge=0,
        lt=inf,
    )
    enable_model_loading: bool = setting(
        False,
        "Let clients load and unload models (POST /v1/models/load and /v1/models/unload), also models added to "
        "--models-dir later.",
        group=MODELS,
        listing=HELP_ALL,
    )

    @property
    def is_wanted(self) -> bool:
        """True if models are loaded and unloaded on demand, even if there is only one."""
        return bool(self.models_dir or self.models_memory or self.keep_alive or self.enable_model_loading)


def models_memory(args: EngineArgs, registry_args: RegistryArgs, device: DeviceInfo) -> int:
    """Return the memory for all loaded models together, in bytes.

    Raises:
        ConfigError: ``--models-memory`` exceeds the memory that is available for models.
    """
    most = device.memory_bytes
    if device.kind != "cpu":
        most = int(most * args.gpu_memory_utilization) - MARGIN_BYTES
    wanted = registry_args.models_memory
    if wanted is None:
        return int(most * _CPU_SHARE) if device.kind == "cpu" else most
    if wanted > most:
        problem = f"{format_size(wanted)} is more than the {format_size(most)} that are available for models"
        raise ConfigError("--models-memory", problem)
    return wanted


def refuse_for_one_model(args: EngineArgs) -> None:
    """Raise ConfigError for settings that a server with several models does not support.

    These are several ranks, LoRA adapters, and speculation with a draft model or draft head.
    """
    if args.num_ranks > 1:
        raise ConfigError(args.ranks_flag, "is for one model that stays loaded, not for models loaded on demand")
    if args.has_adapters:
        flag = LORA_MODULES if args.lora_modules else "--enable-lora"
        raise ConfigError(flag, "is for one model that stays loaded, not for models loaded on demand")
    speculative = speculative_config(args)
    if speculative is not None and speculative.method != "ngram":
        raise ConfigError(
            SPECULATIVE,
            f"with the method {speculative.method} is for one model that stays loaded, not for models loaded on demand",
        )


def per_model_args(args: EngineArgs, memory_bytes: int, device: DeviceInfo) -> EngineArgs:
    """Return the settings for each of several models.

    If the user set no size of the KV cache, it becomes an eighth of ``memory_bytes``, and at most 2 GiB on a CPU.

    Args:
        memory_bytes: memory for all models in bytes.
    """
    if args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None:
        return args
    kv_bytes = int(memory_bytes * _KV_SHARE)
    return replace(
        args, kv_cache_memory_bytes=max(min(kv_bytes, _CPU_KV_BYTES) if device.kind == "cpu" else kv_bytes, 1)
    )
