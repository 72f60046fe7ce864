"""Settings of how the host plans, builds and dispatches steps."""

from __future__ import annotations

from typing import Any

from metal_engine.settings.fields import FILE, HELP_ALL, setting

# Heading in `--help` and in docs/cli.md.
SCHEDULING = "Scheduling"

# Fields of :class:`metal_engine.settings.args.EngineArgs`.
ASYNC_SCHEDULING: Any = setting(
    None,
    "Plan the next step while the device computes. Default: on with Metal on one machine without a draft model.",
    group=SCHEDULING,
    listing=HELP_ALL,
)
MAX_NUM_ENCODER_TOKENS: Any = setting(
    None,
    "Maximum image tokens that a step encodes, and maximum tokens of an image. Default: the tokens of a step, at least "
    "2,048. Memory is reserved for the features of four times this number.",
    group=SCHEDULING,
    listing=HELP_ALL,
    kind="count",
    ge=1,
)
REPLAY_DECODES: Any = setting(
    "auto",
    "Replay traced graphs in decode steps, which saves CPU time: always, never, or auto (on Metal).",
    group=SCHEDULING,
    listing=FILE,
    choices=("auto", "always", "never"),
)
