"""Replacements for operations of mlx-lm's models that MLX's CPU backend computes slowly, element by element.

They take and return the same and differ by float32 rounding. Other devices and dtypes get mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
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


# For fewer rows, the operations below cost more than the sines and cosines.
MIN_TABLE_ROWS = 64


class StepPositions(mx.array):
    """Absolute positions of a step's rows, [N], with the rotations that follow from them: the same for all layers."""

    def __init__(self, positions: mx.array) -> None:
        super().__init__(positions)
        self.tables: dict[tuple[object, ...], tuple[mx.array, mx.array]] = {}


class TableRoPE(nn.RoPE):
    """RoPE that takes sines and cosines from the step where it can: MLX's own computes them anew at every call."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x [N, heads, 1, head_dim] for :class:`StepPositions`; else as ``nn.RoPE``."""
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        large = x.ndim == 4 and x.shape[0] >= MIN_TABLE_ROWS and x.shape[2] == 1
        if not (on_cpu and isinstance(offset, StepPositions) and large and x.dtype == mx.float32):
            return super().__call__(x, offset)  # type: ignore[arg-type]
        key = (self.dims, self.traditional, self.base, self.scale)
        if key not in offset.tables:
            offset.tables[key] = self._table(offset)
        cos, sin = offset.tables[key]
        rest = x[..., self.dims :]
        if self.traditional:  # neighbours
            a, b = x[..., 0 : self.dims : 2], x[..., 1 : self.dims : 2]
            turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(
                *x.shape[:-1], self.dims
            )
            return mx.concatenate([turned, rest], axis=-1) if rest.size else turned
        a, b = x[..., : self.dims // 2], x[..., self.dims // 2 : self.dims]
        return mx.concatenate([a * cos - b * sin, a * sin + b * cos, *([rest] if rest.size else [])], axis=-1)

    def _table(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Cosines and sines, each [N, 1, 1, dims / 2]: what MLX's own makes of the vector (1, 0) of each pair."""
        half = self.dims // 2
        one = [[1.0, 0.0]] * half if self.traditional else [[1.0] * half, [0.0] * half]
        probe = mx.broadcast_to(mx.array(one).reshape(self.dims), (positions.size, 1, 1, self.dims))
        turned = super().__call__(probe, positions)  # type: ignore[arg-type]
        if self.traditional:
            return turned[..., 0::2], turned[..., 1::2]
        return turned[..., :half], turned[..., half:]


def use_tables(model: nn.Module) -> None:
    """Make a model's plain RoPE layers use tables. Other kinds stay as they are."""
    for module in model.modules():
        if type(module) is nn.RoPE:
            module.__class__ = TableRoPE
