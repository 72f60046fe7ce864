"""Rotary embeddings with positions on three axes: time, height and width (M-RoPE). Each frequency belongs to one axis.

The text models of mlx-lm have one axis. Without images, a token has the same position on all axes. A step has
:class:`AxesStepPositions` only if it has tokens whose positions on the axes differ.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.rows import StepRows
from metal_engine.models.cpu_ops import StepPositions, rotate_halves, rotate_neighbours
from metal_engine.models.multimodal.encoder import Axes


class AxesStepPositions(StepPositions):
    """Positions of a step's rows, [N], with their rotary positions on each axis, ``axes``: [3, N]."""

    def __init__(self, positions: mx.array | np.ndarray, axes: mx.array) -> None:
        super().__init__(positions)
        self.axes = axes


def rotary_positions(rows: StepRows, plain: type[mx.array]) -> mx.array:
    """Return the rotary positions of a step: :class:`AxesStepPositions` if its rows have axes, else ``plain``.

    Args:
        rows: rows of the step.
        plain: type of positions without axes, [N].
    """
    if rows.rotary_positions is None:
        return plain(rows.positions)
    if rows.has_axes:
        return AxesStepPositions(rows.positions, mx.array(rows.rotary_positions))
    return plain(rows.rotary_positions)


def use_axes(model: nn.Module, axes: Axes) -> None:
    """Make a model's rotary embeddings use the axes of steps that have them.

    Raises:
        UnsupportedModelError: the model has no ``nn.RoPE``, or the number of frequencies of an ``nn.RoPE`` differs from
            the sum of the axes' sections.
    """
    ropes = [module for module in model.modules() if isinstance(module, nn.RoPE)]
    if not ropes or any(rope.dims // 2 != sum(axes.sections) for rope in ropes):
        raise UnsupportedModelError("its rotary embeddings do not have the axes that its configuration names")
    for rope in ropes:
        rope.__class__ = _with_axes(type(rope), axes)


def _with_axes(cls: type[nn.RoPE], axes: Axes) -> type[nn.RoPE]:
    call = cls.__call__

    def rotate(self: nn.RoPE, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if not isinstance(offset, AxesStepPositions):
            return call(self, x, offset)  # type: ignore[arg-type]
        key = ("axes", self.dims, self.base, self.scale)
        if key not in offset.tables:
            offset.tables[key] = _tables(self, offset.axes, axes)
        cos, sin = offset.tables[key]
        return (rotate_neighbours if self.traditional else rotate_halves)(x, cos, sin).astype(x.dtype)

    return type(cls.__name__, (cls,), {"__call__": rotate})


def _tables(rope: nn.RoPE, positions: mx.array, axes: Axes) -> tuple[mx.array, mx.array]:
    """Return cosines and sines for rotary positions on each axis, [3, N]: two arrays [N, 1, 1, dims / 2] float32."""
    frequencies = rope.base ** (-mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims) * rope.scale
    by_frequency = positions[mx.array(axes.of_frequencies(rope.dims // 2))].T  # [N, dims / 2]
    angles = by_frequency.astype(mx.float32) * frequencies
    return mx.cos(angles)[:, None, None], mx.sin(angles)[:, None, None]
