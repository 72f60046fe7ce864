"""State of the features that depend on the device or on a check at the start: on or off, and why."""

from __future__ import annotations

from collections.abc import Iterator

from metal_engine.engine.core import EngineCore
from metal_engine.settings.config import REPLAYS


def features(core: EngineCore) -> Iterator[tuple[str, str]]:
    """Yield the name of each feature of an engine, and its state: ``("wired memory", "off: --no-wire-memory")``."""
    config = core.config
    layers = config.attention_layers
    yield "attention kernel", config.attention
    if layers.metal:
        yield "tensor operations", layers.tensor_ops or "off: this GPU or this macOS lacks them"
    if config.attention_tuning:
        yield "attention tuning", config.attention_tuning
    is_ahead = config.scheduler.async_scheduling
    yield "planning ahead", "on" if is_ahead else "off: by default only on Metal, with one rank and no draft model"
    if is_ahead:
        yield "dispatch", config.dispatch
    refusal = core.metrics.replay_refusal
    yield (
        "replay",
        f"off: {refusal}" if refusal else "on, checked at the start" if config.replay == REPLAYS else config.replay,
    )
    if config.device.kind == "metal":
        yield "command buffers", str(config.command_buffers or "MLX's own limits (the log says why)")
        yield "wired memory", "on" if config.wire_memory else "off: --no-wire-memory"
