"""Settings of LoRA adapters, and what ``--lora-modules`` says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import HELP_ALL, Setting, SettingsBase, read_object, setting
from metal_engine.settings.model_names import check_name

LORA = "LoRA adapters"
MODULES = "--lora-modules"
# Adapters and rank where the settings leave them open and adapters may come while the engine runs; vLLM's rank.
_MAX_LORAS, _MAX_LORA_RANK = 8, 16
MAX_NAME = 256


@dataclass(frozen=True)
class LoRAModule:
    """An adapter of ``--lora-modules``: its name, the folder of its files, and what it says it is an adapter of."""

    name: str
    path: str
    base_model_name: str | None = None


_KEYS = [Setting("name", "str"), Setting("path", "str"), Setting("base_model_name", "str")]


# Fields of :class:`metal_engine.settings.args.EngineArgs`.
LORA_MODULES: Any = setting(
    (),
    "LoRA adapter to serve under a name of its own: name=path of its folder (PEFT's or mlx-lm's), or JSON with "
    "name, path and base_model_name. Repeat the flag for several.",
    group=LORA,
)
ENABLE_LORA: Any = setting(
    False,
    "Take adapters while the engine runs, too: memory is kept for --max-loras of them. Without it, "
    "--lora-modules are all there are.",
    group=LORA,
    listing=HELP_ALL,
)
MAX_LORAS: Any = setting(
    None,
    "Most adapters at once, all of which may be in one step. Default: as many as --lora-modules; "
    f"{_MAX_LORAS} at least with --enable-lora.",
    group=LORA,
    listing=HELP_ALL,
    ge=1,
    le=1024,
)
MAX_LORA_RANK: Any = setting(
    None,
    "Largest rank of an adapter; all take memory for it. Default: that of --lora-modules; "
    f"{_MAX_LORA_RANK} at least with --enable-lora.",
    group=LORA,
    listing=HELP_ALL,
    ge=1,
    le=4096,
)


class LoRAArgs(SettingsBase):
    """What the settings of adapters come to; names and meanings are vLLM's."""

    lora_modules: tuple[str, ...]
    enable_lora: bool
    max_loras: int | None
    max_lora_rank: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.lora_modules
        if isinstance(given, Mapping):  # as a program may have it
            given = tuple(json.dumps({"name": name, "path": str(path)}) for name, path in given.items())
        object.__setattr__(self, "lora_modules", (given,) if isinstance(given, str) else tuple(given))
        names = [module.name for module in self.adapters]
        if len(set(names)) != len(names):
            raise ConfigError(MODULES, "has a name twice")
        if self.max_loras is not None and self.max_loras < len(names):
            raise ConfigError("--max-loras", f"{self.max_loras} is less than the {len(names)} of {MODULES}")

    @property
    def adapters(self) -> list[LoRAModule]:
        """What ``lora_modules`` says. Raises ConfigError where it is not right."""
        return [_module(text) for text in self.lora_modules]

    @property
    def has_adapters(self) -> bool:
        """Whether the model is to be made for adapters."""
        return self.enable_lora or bool(self.lora_modules)

    def num_slots(self) -> int:
        """Adapters at once."""
        return self.max_loras or max(len(self.lora_modules), _MAX_LORAS if self.enable_lora else 0)

    def largest_rank(self, ranks: list[int]) -> int:
        """The rank that all adapters take memory for.

        Args:
            ranks: of those of ``lora_modules``.

        Raises:
            ConfigError: one is larger than ``max_lora_rank``.
        """
        largest = max(ranks, default=0)
        if self.max_lora_rank is not None and largest > self.max_lora_rank:
            raise ConfigError("--max-lora-rank", f"{self.max_lora_rank} is less than the rank {largest} of an adapter")
        return self.max_lora_rank or max(largest, _MAX_LORA_RANK if self.enable_lora else 0)


def _module(text: str) -> LoRAModule:
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(MODULES, f"is not JSON: {error}") from error
        values = read_object(MODULES, MODULES, given, _KEYS, required=("name", "path"))
        module = LoRAModule(**values)
    else:
        name, _, path = text.partition("=")
        module = LoRAModule(name.strip(), path.strip())
    if not module.name or not module.path or len(module.name) > MAX_NAME:
        raise ConfigError(MODULES, f"must be name=path, or JSON with name and path, got {text[:MAX_NAME]!r}")
    for name in (module.name, module.base_model_name or ""):
        check_name(MODULES, name)
    return module
