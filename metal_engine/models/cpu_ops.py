"""Replacements for operations of mlx-lm's models that MLX's CPU backend computes slowly, element by element.

They take and return the same and differ by float32 rounding. Other devices and dtypes get mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models import activations

from metal_engine.attention.exp2 import LOG2E, exp2, in_pieces


def _silu_times(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1.0 + exp2(mx.clip(gate * -LOG2E, -126.0, 126.0))) * x


_compiled_silu_times = mx.compile(_silu_times)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, of any shape."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape and gate.size:
        return in_pieces(_silu_times, _compiled_silu_times, gate, x)
    return _mlx_lm_swiglu(gate, x)


_mlx_lm_swiglu = activations.swiglu

# mlx-lm's function -> ours.
REPLACEMENTS: list[tuple[Callable[..., mx.array], Callable[..., mx.array]]] = [(_mlx_lm_swiglu, swiglu)]
