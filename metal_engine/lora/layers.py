"""LoRA adapters of a packed step: each row gets its own adapter's addition, ``x @ a @ b``, to a layer's output.

The weights of all adapters that are loaded lie in stacks, one pair a layer, at the adapter's slot; slot 0 is that of
rows without any, and zero. So a layer reads its own weights once for all rows, whatever they are (quantized ones, too),
and two gathered products have the additions of all adapters. A step whose rows have none takes a layer's own way.

Rows of a product are gathered one by one, which on a CPU costs less than a product for each adapter. On a GPU many rows
are sorted by slot first, so that MLX multiplies those of one adapter together, as mlx-lm does with experts.
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

# Rows from which they are sorted on a GPU; mlx-lm sorts for experts from as many on.
MIN_SORTED_ROWS = 64

# Bytes of weights, in float32, that are put into a slot at once; those of one row if that has more.
PART_BYTES = 1 << 20

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

    def set_weights(self, slot: int, weights: Weights | None) -> Iterator[int]:
        """Put an adapter's weights into its slot, part by part; None: it adds nothing here.

        Yields:
            After each part, its bytes (of float32). The slot may be used when all have been taken.
        """
        if weights is None and slot not in self.slots:
            return
        self.slots |= {slot}  # at once: should the rest never come, whoever has the slot next must clear it
        given_a, given_b = weights if weights is not None else (None, None)
        for start, rows in _parts(self.a.shape, given_a):
            self.a = _updated(self.a, slot, start, rows)
            mx.eval(self.a)  # in place, unless a step under way has a part that the device has not been given
            yield rows.nbytes
        for start, rows in _parts(self.b.shape, given_b):
            self.b = _updated(self.b, slot, start, rows)
            mx.eval(self.b)
            yield rows.nbytes
        if weights is None:
            self.slots -= {slot}


def _parts(shape: Sequence[int], given: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """What is given for a slot of a stack, padded with zeros: a first row, and [n, columns] float32 from there on."""
    _, num_rows, num_columns = shape
    num = max(PART_BYTES // (4 * num_columns), 1)
    for start in range(0, num_rows, num):
        rows = np.zeros((min(num, num_rows - start), num_columns), np.float32)
        if given is not None:
            part = given[start : start + num]
            rows[: len(part), : part.shape[1]] = part
        yield start, rows


def _updated(stack: mx.array, slot: int, start: int, rows: np.ndarray) -> mx.array:
    """A stack with rows put into a slot, to be evaluated; takes the stack's memory if the caller lets go of it.

    A step that has not been given to the device whole keeps the stack that it was built with; this one is a copy then.
    """
    synchronize()  # what the device has of a step holds what it reads
    update = mx.array(rows)[None].astype(stack.dtype)
    return mx.slice_update(stack, update, mx.array([slot, start]), axes=(0, 1))


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

    def set_weights(self, slot: int, weights: Mapping[str, Weights | None]) -> Iterator[int]:
        """Put what an adapter adds to some layers into its slot, as :meth:`AdaptedLayer.set_weights`."""
        for name, one in weights.items():
            yield from self._layers[name].set_weights(slot, one)

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
