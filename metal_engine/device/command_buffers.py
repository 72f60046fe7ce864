"""How much MLX puts into one of Metal's command buffers: a limit of operations, and one of memory, of the process.

MLX commits a command buffer when it has more than ``MLX_MAX_OPS_PER_BUFFER`` kernels, or when its arrays have more than
``MLX_MAX_MB_PER_BUFFER`` * 2**20 elements. By default both are 40 or 50. An array counts whole, the KV cache's too, of
which a kernel reads a few rows: with a large cache each layer becomes several command buffers. And MLX lets its caller
go on only while at most 10 of them are unfinished. So the first limit is to leave a step with a number that fits that
rule, and the second must not be met.

A layer's array of KV can be written in place while the step before still runs if that has let go of it, which it has
when the command buffer that reads it is done. As at most 10 are unfinished, a step needs more than those.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from metal_engine.settings.config import CommandBufferLimits

MAX_OPS = "MLX_MAX_OPS_PER_BUFFER"
MAX_MB = "MLX_MAX_MB_PER_BUFFER"

# Command buffers of a step of one token a request. From 14 on, nothing of the cache is copied; each costs host time.
BUFFERS_PER_STEP = 16
# Kernels of a layer, at least, in most of the architectures that run here; tests count them.
_KERNELS_PER_LAYER = 16
_KERNELS_PER_LAYER_OF_EXPERTS = 28
# MLX's own limit of operations is 40 on some Macs and 50 on others; at most, that is.
_MOST_OWN_OPS = 50
_LEAST_OPS = 4
_LEAST_MB = 50
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def kernels_of_step(config: Mapping[str, Any]) -> int | None:
    """About how many kernels a step launches, from a model's ``config.json``; None where that does not say."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else {}
    if _num_layers(inner) is None:
        inner = {**inner, **config}
    num_layers = _num_layers(inner)
    if num_layers is None:
        return None
    has_experts = any(isinstance(n := inner.get(name), int) and n > 1 for name in _EXPERTS)
    return num_layers * (_KERNELS_PER_LAYER_OF_EXPERTS if has_experts else _KERNELS_PER_LAYER)


def _num_layers(config: Mapping[str, Any]) -> int | None:
    return next((n for name in _LAYERS if isinstance(n := config.get(name), int) and n > 0), None)


def command_buffer_limits(
    configs: Iterable[Mapping[str, Any]], memory_bytes: int, *, allows_queued_dispatch: bool
) -> CommandBufferLimits:
    """The limits for a process that serves models with these ``config.json``: of several, what the smallest needs.

    MLX's own limit of operations stays where no model is known. Where no step can go behind another, few command
    buffers do no harm: it stays there, too, unless the models' is higher.

    Args:
        memory_bytes: of the machine. Whatever the cache takes of it, a command buffer has about a step's share.
        allows_queued_dispatch: whether steps may be dispatched behind others.
    """
    known = [kernels for config in configs if (kernels := kernels_of_step(config)) is not None]
    # One more than the limit goes into a command buffer.
    max_ops = max(min(known) // BUFFERS_PER_STEP - 1, _LEAST_OPS) if known else None
    if max_ops is not None and not allows_queued_dispatch and max_ops <= _MOST_OWN_OPS:
        max_ops = None
    elements = memory_bytes // 2  # all of it, in half precision
    return CommandBufferLimits(max_ops, max(2 * elements // BUFFERS_PER_STEP >> 20, _LEAST_MB))


def set_command_buffer_limits(limits: CommandBufferLimits) -> None:
    """Set what the user has not, before MLX is loaded, which reads it once; nothing where it has been."""
    if "mlx.core" in sys.modules:
        return
    for name, limit in ((MAX_OPS, limits.max_ops), (MAX_MB, limits.max_mb)):
        if limit is not None:
            os.environ.setdefault(name, str(limit))


def limits_in_force() -> CommandBufferLimits | None:
    """What the environment says; None where it says nothing, and of a limit where it does not say that in numbers."""
    given = [os.environ.get(name, "") for name in (MAX_OPS, MAX_MB)]
    limits = [int(text) if text.isdecimal() else None for text in given]
    return None if limits == [None, None] else CommandBufferLimits(*limits)
