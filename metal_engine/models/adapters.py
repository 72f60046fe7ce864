"""LoRA adapters of a packed step: each row gets its own adapter's addition, ``x @ a @ b``, to a layer's output.

The weights of all adapters that are loaded lie in stacks, one pair a layer, at the adapter's slot; slot 0 is that of
rows without any, and zero. So a layer reads its own weights once for all rows, whatever they are (quantized ones, too),
and two gathered products have the additions of all adapters. A step whose rows have none takes a layer's own way.

Rows of a product are gathered one by one, which on a CPU costs less than a product for each adapter. On a GPU many rows
are sorted by slot first, so that MLX multiplies those of one adapter together, as mlx-lm does with experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_engine.device.info import computes_on_cpu
from metal_engine.models.current_step import CurrentStep

# Rows from which they are sorted on a GPU; mlx-lm sorts for experts from as many on.
MIN_SORTED_ROWS = 64

Weights = tuple[np.ndarray, np.ndarray]  # a [inputs, rank], b [rank, outputs]; float32


class AdaptedLayer:
    """The additions of all adapters to one linear layer.

    Attributes:
        a: [1 + max_loras, inputs, max_rank]; those of a lesser rank are padded with zeros.
        b: [1 + max_loras, max_rank, outputs].
        slots: of the adapters that add to this layer.
    """

    def __init__(self, shape: tuple[int, int], max_loras: int, max_rank: int, dtype: mx.Dtype) -> None:
        self.a = mx.zeros((1 + max_loras, shape[0], max_rank), dtype)
        self.b = mx.zeros((1 + max_loras, max_rank, shape[1]), dtype)
        self.slots: frozenset[int] = frozenset()
        mx.eval(self.a, self.b)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def set_weights(self, slot: int, weights: Weights | None) -> None:
        """Put an adapter's weights into its slot; None: it adds nothing here."""
        if weights is None and slot not in self.slots:
            return
        a, b = np.zeros(self.a.shape[1:], np.float32), np.zeros(self.b.shape[1:], np.float32)
        if weights is not None:
            a[:, : weights[0].shape[1]], b[: weights[1].shape[0]] = weights
        start = mx.array([slot])
        # New arrays: a step under way may still read the ones before.
        self.a = mx.slice_update(self.a, mx.array(a)[None].astype(self.a.dtype), start, axes=(0,))
        self.b = mx.slice_update(self.b, mx.array(b)[None].astype(self.b.dtype), start, axes=(0,))
        mx.eval(self.a, self.b)
        self.slots = self.slots | {slot} if weights is not None else self.slots - {slot}


class AdapterRows:
    """Which adapter each of a step's rows goes through.

    Args:
        slots: [N] int32, of adapters; 0: none. Some are not 0.
        is_sorted: whether rows are sorted by slot for products; those without an adapter are left out then.
        everywhere: whether there are additions to layers, too, to which no adapter adds: the most that may be.
    """

    def __init__(self, slots: np.ndarray, *, is_sorted: bool, everywhere: bool = False) -> None:
        self._num_rows = len(slots)
        self._everywhere = everywhere
        self._present = frozenset(np.unique(slots[slots > 0]).tolist())
        self._is_sorted = is_sorted
        if is_sorted:
            order = np.argsort(slots, kind="stable")
            order = order[slots[order] > 0]
            places = np.full(len(slots), len(order), np.int32)  # of rows without any: that of a row of zeros
            places[order] = np.arange(len(order), dtype=np.int32)
            self._order, self._places, slots = mx.array(order.astype(np.int32)), mx.array(places), slots[order]
            self._picked: tuple[mx.array, mx.array] | None = None  # layers side by side have the same input
        self._slots = mx.array(slots.astype(np.uint32))

    def added(self, layer: AdaptedLayer, x: mx.array, y: mx.array) -> mx.array:
        """A layer's output y with the additions for its input x, one row for each of the step's in either."""
        if self._present.isdisjoint(layer.slots) and not self._everywhere:
            return y
        num_inputs = x.shape[-1]
        if x.size != self._num_rows * num_inputs:
            raise ValueError(f"a layer with adapters got {x.shape} for {self._num_rows} rows")
        addition = self._products(layer, self._rows(x))
        if self._is_sorted:
            addition = mx.concatenate([addition, mx.zeros_like(addition[:1])])[self._places]
        return y + addition.reshape(y.shape).astype(y.dtype)

    def _rows(self, x: mx.array) -> mx.array:  # [M, 1, inputs]
        rows = x.reshape(self._num_rows, 1, x.shape[-1])
        if not self._is_sorted:
            return rows
        if self._picked is None or self._picked[0] is not x:
            self._picked = x, rows[self._order]
        return self._picked[1]

    def _products(self, layer: AdaptedLayer, rows: mx.array) -> mx.array:  # [M, 1, outputs]
        inner = mx.gather_mm(rows, layer.a, rhs_indices=self._slots, sorted_indices=self._is_sorted)
        return mx.gather_mm(inner, layer.b, rhs_indices=self._slots, sorted_indices=self._is_sorted)


class AdaptedLayers:
    """The layers of a model that adapters may add to; installs itself in them.

    Args:
        modules: linear layers by their names in the model.
        step: where they find the rows' adapters.
        max_loras: adapters at once.
        max_rank: of their products.
        dtype: of the model's activations.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], step: CurrentStep, max_loras: int, max_rank: int, dtype: mx.Dtype
    ) -> None:
        self.max_loras = max_loras
        self._layers: dict[str, AdaptedLayer] = {}
        for name, module in modules.items():
            self._layers[name] = layer = AdaptedLayer(shape_of(module), max_loras, max_rank, dtype)
            _adapt(module, layer, step)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers.values())

    def set_weights(self, slot: int, weights: Mapping[str, Weights | None]) -> None:
        """Put what an adapter adds to some layers into its slot."""
        for name, one in weights.items():
            self._layers[name].set_weights(slot, one)

    def rows(self, slots: np.ndarray) -> AdapterRows:
        """What a step needs; ``slots`` [N] int32 are of its rows, and not all 0."""
        return AdapterRows(slots, is_sorted=_sorts(len(slots)))

    def most_rows(self, num_rows: int) -> AdapterRows:
        """What the step needs that adapters cost most: all its rows have one, which adds to every layer."""
        return AdapterRows(np.ones(num_rows, np.int32), is_sorted=_sorts(num_rows), everywhere=True)


def _sorts(num_rows: int) -> bool:
    return num_rows >= MIN_SORTED_ROWS and not computes_on_cpu()


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Numbers of inputs and outputs of a linear layer."""
    num_outputs, num_inputs = module.weight.shape
    if isinstance(module, nn.QuantizedLinear):
        num_inputs = num_inputs * 32 // module.bits
    return num_inputs, num_outputs


def _adapt(module: nn.Module, layer: AdaptedLayer, step: CurrentStep) -> None:
    cls = type(module)
    call = cls.__call__

    def with_adapters(self: nn.Module, x: mx.array) -> mx.array:
        y: mx.array = call(self, x)
        return y if step.adapters is None else step.adapters.added(layer, x, y)

    module.__class__ = type(cls.__name__, (cls,), {"__call__": with_adapters})
