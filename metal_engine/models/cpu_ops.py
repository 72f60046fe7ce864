"""Replacements for operations of mlx-lm's models that MLX's CPU backend computes slowly, element by element.

``mlx_lm_patch`` installs them only if MLX computes on a CPU. They have the same arguments and results as the original
operations, up to float32 rounding. If an array is not float32 or is small, they call the original operations.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations

from metal_engine.attention.portable.exp2 import LOG2E, exp2
from metal_engine.device.compiled import CompiledByShape
from metal_engine.device.info import computes_on_cpu


def _on_cpu(*arrays: mx.array) -> bool:
    """Return True if MLX computes on the CPU and all arrays are float32.

    Each call of a replacement checks this, because the replacements affect all models of the process.
    """
    return computes_on_cpu() and all(array.dtype == mx.float32 for array in arrays)


MIN_SWIGLU = 2048  # elements; below this, the call costs more than it saves


def _silu_times(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1.0 + exp2(mx.clip(gate * -LOG2E, -126.0, 126.0))) * x


_compiled_silu_times = CompiledByShape(_silu_times)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Compute silu(gate) * x for arrays of any shape."""
    if _on_cpu(gate, x) and gate.shape == x.shape and gate.size >= MIN_SWIGLU:
        return _compiled_silu_times(gate, x)
    return _mlx_lm_swiglu(gate, x)


_mlx_lm_swiglu = activations.swiglu

# (mlx-lm's function, replacement)
REPLACEMENTS: list[tuple[Callable[..., mx.array], Callable[..., mx.array]]] = [(_mlx_lm_swiglu, swiglu)]


MIN_NORM_ROWS = 16  # rows of RMSNorm; below this, the additional operations cost more than they save


class StepPositions(mx.array):
    """Absolute positions of a step's rows, [N], with a cache of the cosines and sines that layers rotate with.

    Attributes:
        tables: parameters of a RoPE layer -> its cosines and sines. Layers with equal parameters share them.
    """

    def __init__(self, positions: mx.array | np.ndarray) -> None:
        super().__init__(positions)
        self.tables: dict[tuple[object, ...], tuple[mx.array, mx.array]] = {}


def rotate_neighbours(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate the pairs of columns (0, 1), (2, 3), ... of x, [..., head_dim].

    ``cos`` and ``sin`` have one angle for each pair, [..., dims / 2]. Columns from ``dims`` on stay unchanged.
    """
    dims = 2 * cos.shape[-1]
    a, b = x[..., 0:dims:2], x[..., 1:dims:2]
    turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(*x.shape[:-1], dims)
    return mx.concatenate([turned, x[..., dims:]], axis=-1) if x.shape[-1] > dims else turned


def rotate_halves(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate the pairs of columns (0, dims / 2), (1, dims / 2 + 1), ... of x, [..., head_dim].

    Takes the arguments of :func:`rotate_neighbours`. Columns from ``dims`` on stay unchanged.
    """
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos, *([rest] if rest.size else [])], axis=-1)


_rotated_neighbours, _rotated_halves = CompiledByShape(rotate_neighbours), CompiledByShape(rotate_halves)


class TableRoPE(nn.RoPE):
    """RoPE whose layers share the step's cosines and sines. MLX's RoPE computes them in every call."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x by the positions ``offset``.

        Uses the tables of ``offset`` if it is a :class:`StepPositions`, x has the shape [N, heads, 1, head_dim], and x
        is float32 on a CPU. Otherwise, calls ``nn.RoPE``.
        """
        if not (isinstance(offset, StepPositions) and x.ndim == 4 and x.shape[2] == 1 and _on_cpu(x)):
            return super().__call__(x, offset)  # type: ignore[arg-type]
        key = (self.dims, self.traditional, self.base, self.scale)
        if key not in offset.tables:
            offset.tables[key] = self._table(offset)
        cos, sin = offset.tables[key]
        return (_rotated_neighbours if self.traditional else _rotated_halves)(x, cos, sin)

    def _table(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return cosines and sines, each [N, 1, 1, dims / 2]: MLX's rotation of the vector (1, 0) of each pair."""
        half = self.dims // 2
        one = [[1.0, 0.0]] * half if self.traditional else [[1.0] * half, [0.0] * half]
        probe = mx.broadcast_to(mx.array(one).reshape(self.dims), (positions.size, 1, 1, self.dims))
        turned = super().__call__(probe, positions)  # type: ignore[arg-type]
        if self.traditional:
            return turned[..., 0::2], turned[..., 1::2]
        return turned[..., :half], turned[..., half:]


def _scale(x: mx.array, by_row: mx.array, weight: mx.array) -> mx.array:
    return x * by_row * weight


_scaled = CompiledByShape(_scale)


class ProductRMSNorm(nn.RMSNorm):
    """RMSNorm whose sum is a matrix product: MLX's RMSNorm sums along the last axis element by element."""

    def __call__(self, x: mx.array) -> mx.array:
        dims = x.shape[-1]
        if not _on_cpu(x) or x.size < MIN_NORM_ROWS * dims:
            return super().__call__(x)
        mean = (x * x).reshape(-1, dims) @ mx.full((dims, 1), 1 / dims)
        return _scaled(x, mx.rsqrt(mean + self.eps).reshape(*x.shape[:-1], 1), self.weight)


_FASTER_LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.RoPE: TableRoPE, nn.RMSNorm: ProductRMSNorm}


def use_faster_layers(model: nn.Module) -> None:
    """Replace the classes of a model's plain RoPE and RMSNorm layers. Layers of derived classes stay unchanged."""
    for module in model.modules():
        module.__class__ = _FASTER_LAYERS.get(type(module), type(module))
