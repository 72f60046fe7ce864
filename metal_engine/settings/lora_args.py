"""Settings of LoRA adapters, and the parser of ``--lora-modules``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import HELP_ALL, Setting, SettingsBase, read_object, setting
from metal_engine.settings.served_names import check_name

LORA = "LoRA adapters"
MODULES = "--lora-modules"
# Defaults of --max-loras and --max-lora-rank with --enable-lora. The rank is vLLM's default.
_MAX_LORAS, _MAX_LORA_RANK = 8, 16
MAX_NAME = 256


@dataclass(frozen=True)
class LoRAModule:
    """An adapter of ``--lora-modules``: its name, its folder, and the declared name of its base model."""

    name: str
    path: str
    base_model_name: str | None = None


_KEYS = [Setting("name", "str"), Setting("path", "str"), Setting("base_model_name", "str")]


# Fields of :class:`metal_engine.settings.args.EngineArgs`.
LORA_MODULES: Any = setting(
    (),
    "LoRA adapter to serve: name=path of its folder (PEFT or mlx-lm), or JSON with name, path and "
    "base_model_name. Repeatable.",
    group=LORA,
)
ENABLE_LORA: Any = setting(
    False, "Allow loading LoRA adapters later, with memory for --max-loras adapters.", group=LORA, listing=HELP_ALL
)
MAX_LORAS: Any = setting(
    None,
    "Maximum loaded LoRA adapters, also of one step. Default: the number of --lora-modules; "
    f"at least {_MAX_LORAS} with --enable-lora.",
    group=LORA,
    listing=HELP_ALL,
    ge=1,
    le=1024,
)
MAX_LORA_RANK: Any = setting(
    None,
    "Maximum rank of LoRA adapters. Each adapter takes memory for this rank. Default: maximum of --lora-modules; "
    f"at least {_MAX_LORA_RANK} with --enable-lora.",
    group=LORA,
    listing=HELP_ALL,
    ge=1,
    le=4096,
)


class LoRAArgs(SettingsBase):
    """Base class with the settings of LoRA adapters. Their names and meanings are vLLM's."""

    lora_modules: tuple[str, ...]
    enable_lora: bool
    max_loras: int | None
    max_lora_rank: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.lora_modules
        if isinstance(given, Mapping):  # format of Python callers
            given = tuple(json.dumps({"name": name, "path": str(path)}) for name, path in given.items())
        object.__setattr__(self, "lora_modules", (given,) if isinstance(given, str) else tuple(given))
        names = [module.name for module in self.adapters]
        if len(set(names)) != len(names):
            raise ConfigError(MODULES, "contains a name twice")
        if self.max_loras is not None and self.max_loras < len(names):
            raise ConfigError("--max-loras", f"{self.max_loras} is less than the {len(names)} adapters of {MODULES}")

    @property
    def adapters(self) -> list[LoRAModule]:
        """Parsed entries of ``lora_modules``. Raises ConfigError for an invalid entry."""
        return [_module(text) for text in self.lora_modules]

    @property
    def has_adapters(self) -> bool:
        """True if the model is loaded with support for LoRA adapters."""
        return self.enable_lora or bool(self.lora_modules)

    def num_slots(self) -> int:
        """Return the maximum number of loaded adapters: ``max_loras``, or else its default.

        The default is 0 if the model is loaded without support for adapters.
        """
        return self.max_loras or max(len(self.lora_modules), _MAX_LORAS if self.enable_lora else 0)

    def largest_rank(self, ranks: list[int]) -> int:
        """Return the rank for which each adapter slot has memory: ``max_lora_rank``, or else its default.

        The default is the largest of ``ranks``, and at least ``_MAX_LORA_RANK`` with ``enable_lora``.

        Args:
            ranks: ranks of the adapters in ``lora_modules``.

        Raises:
            ConfigError: a rank is larger than ``max_lora_rank``.
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
    check_name(MODULES, module.name)
    if module.base_model_name:
        check_name(MODULES, module.base_model_name)
    return module
