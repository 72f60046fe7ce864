"""LoRA adapters in a packed step: each row's own adapter adds ``x @ a @ b`` to the output of a layer.

Each layer has two arrays, called stacks, with the weights a and b of all loaded adapters. An adapter's index in every
stack is its slot. Slot 0 is zero and belongs to rows without an adapter. A layer reads its own weights, which may be
quantized, once for all rows. Two gathered products compute the additions of all adapters. A step without adapters skips
these products.

On a CPU, the rows of a product are gathered one by one, which costs less than one product per adapter. On a GPU, many
rows are first sorted by slot, so that MLX multiplies all rows of an adapter together, as mlx-lm does with experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_engine.device.info import computes_on_cpu
from metal_engine.device.streams import synchronize

if TYPE_CHECKING:
    from metal_engine.models.current_step import CurrentStep

# Minimum number of rows of a step that are sorted by slot on a GPU. mlx-lm uses the same minimum for experts.
MIN_SORTED_ROWS = 64

# Maximum bytes of float32 weights that are written to a slot at once. A single row that is larger is written whole.
PART_BYTES = 1 << 20

Weights = tuple[np.ndarray, np.ndarray]  # a [inputs, rank], b [rank, outputs]; float32


class AdaptedLayer:
    """Additions of all adapters to one linear layer.

    Attributes:
        a: weights of all slots, [1 + max_loras, inputs, max_rank]; adapters of lower rank are padded with zeros.
        b: weights of all slots, [1 + max_loras, max_rank, outputs]. They include the adapters' scales.
        slots: slots of the adapters that add to this layer.
    """

    def __init__(self, shape: tuple[int, int], max_loras: int, max_rank: int, dtype: mx.Dtype) -> None:
        self.a = mx.zeros((1 + max_loras, shape[0], max_rank), dtype)
        self.b = mx.zeros((1 + max_loras, max_rank, shape[1]), dtype)
        self.slots: frozenset[int] = frozenset()
        mx.eval(self.a, self.b)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def set_weights(self, slot: int, weights: Weights | None) -> Iterator[int]:
        """Write an adapter's weights to its slot, part by part, while the result is iterated.

        Args:
            slot: slot of the adapter.
            weights: weights of the adapter. None clears the slot: the adapter does not add to this layer.

        Yields:
            Size in bytes (of float32) of each part, after writing it. The slot is usable after the last part.
        """
        if weights is None and slot not in self.slots:
            return
        self.slots |= {slot}  # first: if the generator is abandoned, the next user of the slot must clear it
        given_a, given_b = weights if weights is not None else (None, None)
        for start, rows in _parts(self.a.shape, given_a):
            self.a = _updated(self.a, slot, start, rows)
            mx.eval(self.a)  # in place, unless a step in flight has undispatched operations
            yield rows.nbytes
        for start, rows in _parts(self.b.shape, given_b):
            self.b = _updated(self.b, slot, start, rows)
            mx.eval(self.b)
            yield rows.nbytes
        if weights is None:
            self.slots -= {slot}


def _parts(shape: Sequence[int], given: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the weights for a slot of a stack in parts, padded with zeros: (first row, [n, columns] float32).

    Args:
        shape: shape of the stack, [slots, rows, columns].
        given: weights, at most [rows, columns]; None for zeros.
    """
    _, num_rows, num_columns = shape
    num = max(PART_BYTES // (4 * num_columns), 1)
    for start in range(0, num_rows, num):
        rows = np.zeros((min(num, num_rows - start), num_columns), np.float32)
        if given is not None:
            part = given[start : start + num]
            rows[: len(part), : part.shape[1]] = part
        yield start, rows


def _updated(stack: mx.array, slot: int, start: int, rows: np.ndarray) -> mx.array:
    """Return a stack with ``rows`` written to a slot, not evaluated yet. Waits until the device has completed all work.

    The result reuses the stack's memory if nothing else references the stack. It is a copy while a step that was built
    with the stack is not completely dispatched.

    Args:
        start: first of the slot's rows to write.
    """
    synchronize()  # dispatched operations reference the arrays that they read
    update = mx.array(rows)[None].astype(stack.dtype)
    return mx.slice_update(stack, update, mx.array([slot, start]), axes=(0, 1))


class AdapterRows:
    """LoRA adapter of each row of a step.

    Args:
        slots: adapter slots, [N] int32; 0 for a row without an adapter. At least one slot is not 0.
        is_sorted: True to sort the rows by slot for the products, and to leave out rows without an adapter.
        everywhere: True to compute additions even for layers to which no adapter adds, as in the most expensive step.
    """

    def __init__(self, slots: np.ndarray, *, is_sorted: bool, everywhere: bool = False) -> None:
        self._num_rows = len(slots)
        self._everywhere = everywhere
        self._present = frozenset(np.unique(slots[slots > 0]).tolist())
        self._is_sorted = is_sorted
        if is_sorted:
            order = np.argsort(slots, kind="stable")
            order = order[slots[order] > 0]
            places = np.full(len(slots), len(order), np.int32)  # rows without an adapter use an appended row of zeros
            places[order] = np.arange(len(order), dtype=np.int32)
            self._order, self._places, slots = mx.array(order.astype(np.int32)), mx.array(places), slots[order]
            # The last layer's input and its sorted rows, because neighbouring layers have the same input.
            self._picked: tuple[mx.array, mx.array] | None = None
        self._slots = mx.array(slots.astype(np.uint32))

    def added(self, layer: AdaptedLayer, x: mx.array, y: mx.array) -> mx.array:
        """Return a layer's output y plus the adapters' additions for its input x, in y's shape and type.

        Both arrays have the rows of the step. Returns y itself if no adapter of the step adds to the layer. Raises
        ValueError if x has another number of rows.
        """
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
    """Layers of a model that adapters may add to. The constructor replaces the classes of the model's linear layers.

    Args:
        modules: linear layers by their names in the model.
        step: the running step, whose ``adapters`` the layers read in each call.
        max_loras: maximum number of loaded adapters.
        max_rank: maximum LoRA rank.
        dtype: type of the model's activations.
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

    def set_weights(self, slot: int, weights: Mapping[str, Weights | None]) -> Iterator[int]:
        """Write an adapter's weights for some layers to its slot, while the result is iterated.

        Yields the values of :meth:`AdaptedLayer.set_weights`.

        Args:
            slot: slot of the adapter.
            weights: layer name -> weights; None for a layer to which the adapter does not add.
        """
        for name, one in weights.items():
            yield from self._layers[name].set_weights(slot, one)

    def rows(self, slots: np.ndarray) -> AdapterRows:
        """Return the adapters of a step's rows. ``slots`` is [N] int32, with at least one slot that is not 0."""
        return AdapterRows(slots, is_sorted=_sorts(len(slots)))

    def worst_case_rows(self, num_rows: int) -> AdapterRows:
        """Return rows for measuring the most expensive step: every row has an adapter that adds to every layer."""
        return AdapterRows(np.ones(num_rows, np.int32), is_sorted=_sorts(num_rows), everywhere=True)


def _sorts(num_rows: int) -> bool:
    return num_rows >= MIN_SORTED_ROWS and not computes_on_cpu()


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
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
