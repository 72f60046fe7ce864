"""Limits of the size of Metal's command buffers in MLX: a number of kernels, and a number of elements of their arrays.

MLX commits a command buffer when it has more than ``MLX_MAX_OPS_PER_BUFFER`` kernels, or when its arrays have more than
``MLX_MAX_MB_PER_BUFFER`` * 2**20 elements. Both are 40 or 50 by default. An array counts completely, even the KV cache,
of which a kernel reads only a few rows. With a large cache, each layer therefore becomes several command buffers. MLX
also blocks its caller while more than 10 command buffers are unfinished. Therefore, the first limit must give a step a
suitable number of command buffers, and the second limit must never be reached.

A layer's KV array can be written in place while the previous step still runs, if that step has released the array. A
step releases the array when the command buffer that reads it completes. At most 10 command buffers are unfinished. When
the caller has dispatched a step with more than 10 command buffers, the first command buffers have completed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from metal_engine.settings.config import CommandBufferLimits

MAX_OPS = "MLX_MAX_OPS_PER_BUFFER"
MAX_MB = "MLX_MAX_MB_PER_BUFFER"

# Number of command buffers in a step with one token per request. At least 14 avoid copies of the cache. Each command
# buffer takes host time.
BUFFERS_PER_STEP = 16
# Minimum number of kernels of a layer, in most of the supported architectures. Tests count them.
_KERNELS_PER_LAYER = 16
_KERNELS_PER_LAYER_OF_EXPERTS = 28
# MLX's own limit of operations: 40 on some Macs, 50 on others. This is the higher one.
_MOST_OWN_OPS = 50
_LEAST_OPS = 4
_LEAST_MB = 50
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def kernels_of_step(config: Mapping[str, Any]) -> int | None:
    """Return the approximate number of kernels in a step, from a model's ``config.json``; None if unknown."""
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
    """Return the limits for a process that serves the models with these ``config.json``.

    The model with the fewest kernels determines the limit of operations.

    ``max_ops`` of the result is None, which keeps MLX's own limit, in two cases:

    - No model is known.
    - Steps are never dispatched while another step runs, and the models' limit is not higher than MLX's own. Few
      command buffers are enough for such steps.

    Args:
        memory_bytes: memory of the machine in bytes. The arrays of a step may take all memory. A command buffer reads
            about 1 / ``BUFFERS_PER_STEP`` of these arrays.
        allows_queued_dispatch: True if a step may be dispatched while another step runs.
    """
    known = [kernels for config in configs if (kernels := kernels_of_step(config)) is not None]
    # A command buffer gets one operation more than the limit.
    max_ops = max(min(known) // BUFFERS_PER_STEP - 1, _LEAST_OPS) if known else None
    if max_ops is not None and not allows_queued_dispatch and max_ops <= _MOST_OWN_OPS:
        max_ops = None
    elements = memory_bytes // 2  # all memory, in half precision
    return CommandBufferLimits(max_ops, max(2 * elements // BUFFERS_PER_STEP >> 20, _LEAST_MB))


def set_command_buffer_limits(limits: CommandBufferLimits) -> None:
    """Set the environment variables of the limits, except variables that the user has set, and limits that are None.

    Does nothing after MLX was loaded, because MLX reads the variables only once.
    """
    if "mlx.core" in sys.modules:
        return
    for name, limit in ((MAX_OPS, limits.max_ops), (MAX_MB, limits.max_mb)):
        if limit is not None:
            os.environ.setdefault(name, str(limit))


def limits_in_force() -> CommandBufferLimits | None:
    """Return the limits in the environment variables; None if neither variable is a number.

    If only one variable is a number, the other limit of the result is None.
    """
    given = [os.environ.get(name, "") for name in (MAX_OPS, MAX_MB)]
    limits = [int(text) if text.isdecimal() else None for text in given]
    return None if limits == [None, None] else CommandBufferLimits(*limits)
