"""Settings of the attention backend and its tuning."""

from __future__ import annotations

from typing import Any

from metal_engine.settings.fields import HELP_ALL, setting

# Heading in `--help` and in docs/cli.md.
MODEL = "Model"

# Fields of :class:`metal_engine.settings.args.EngineArgs`.
ATTENTION_BACKEND: Any = setting(
    "auto",
    "Attention backend: metal (our kernel, or an error), mlx (MLX's operations), or auto (our kernel where it "
    "supports the layer).",
    group=MODEL,
    listing=HELP_ALL,
    choices=("auto", "metal", "mlx"),
)
ATTENTION_TUNING: Any = setting(
    "auto",
    "Tuning of the attention kernel at the first start on a GPU: auto (at most 10 s) or never.",
    group=MODEL,
    listing=HELP_ALL,
    choices=("auto", "never"),
)
