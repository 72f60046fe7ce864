"""Memory settings other than the KV cache settings."""

from __future__ import annotations

from metal_engine.settings.fields import HELP_ALL, setting

MEMORY = "Memory"

WIRE_MEMORY = setting(
    True,
    "Wire the memory of weights, KV cache and largest step (Metal), so that macOS cannot swap it out (see "
    "docs/mac.md for kernel panics).",
    group=MEMORY,
    listing=HELP_ALL,
)
