"""Collapses chains of array views while a step is traced: a view of a view becomes a single view of the original array.

mlx-lm's layers reshape, transpose and squeeze the rows of single tokens several times in succession, without moving an
element. Each view is a node of the graph and costs the host more than a microsecond in every replay. MLX fuses the
arithmetic of a trace, but not its views. The views are therefore merged when they are created, once per trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

_Function = Callable[..., Any]
_Shape = Sequence[int]

_one_trace_at_a_time = threading.Lock()


@contextmanager
def fused_views() -> Iterator[None]:
    """Merge the views that this thread creates within the context.

    Replaces functions of ``mlx.core``. Other threads create views as before, but wait to enter this context.
    """
    views = _Views()
    with _one_trace_at_a_time:
        originals = [(owner, name, getattr(owner, name)) for owner, name in (*_SHAPE_AFTER, *_IN_PLACE)]
        try:
            for owner, name, original in originals:
                setattr(owner, name, views.function(original, _SHAPE_AFTER.get((owner, name))))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


class _Views:
    """Map from each view that the constructing thread has created to its base array.

    The base array has the same elements in the same order.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        # Id of a view -> (view, base). The entry keeps the view alive, so that its id stays valid.
        self._bases: dict[int, tuple[mx.array, mx.array]] = {}

    def function(self, original: _Function, shape_after: Callable[..., _Shape | None] | None) -> _Function:
        """Return the replacement of a function of an array.

        Args:
            shape_after: function of the array's shape and the call's arguments. It returns the shape of the result, or
                None if the call must not be merged. If ``shape_after`` itself is None, ``original`` modifies the array
                in place.
        """

        def merging(array: mx.array, *args: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread or options:
                return original(array, *args, **options)
            if shape_after is None:
                self._bases.pop(id(array), None)
                return original(array, *args)
            shape = shape_after(array.shape, *args)
            return original(array, *args) if shape is None else self._view(array, shape)

        return merging

    def _view(self, array: mx.array, shape: _Shape) -> mx.array:
        _, base = self._bases.get(id(array), (None, None))
        if base is None:
            # A new object, which in-place operations on `array` do not change. This reshape adds no operation.
            base = _reshape(array, array.shape)
        view: mx.array = _reshape(base, shape)
        self._bases[id(view)] = view, base
        return view


_reshape = mx.array.reshape


def _reshaped(shape: _Shape, *new: Any) -> _Shape:
    return new if len(new) != 1 or isinstance(new[0], int) else new[0]


def _transposed(shape: _Shape, *axes: Any) -> _Shape | None:
    order = [axis % len(shape) for axis in _reshaped(shape, *axes)]
    moved = [axis for axis in order if shape[axis] != 1]
    return [shape[axis] for axis in order] if order and moved == sorted(moved) else None


def _squeezed(shape: _Shape, axis: Any = None) -> _Shape | None:
    if not isinstance(axis, int) or shape[axis] != 1:
        return None
    axis %= len(shape)
    return [*shape[:axis], *shape[axis + 1 :]]


def _expanded(shape: _Shape, axis: Any) -> _Shape | None:
    if not isinstance(axis, int):
        return None
    axis %= len(shape) + 1
    return [*shape[:axis], 1, *shape[axis:]]


_SHAPE_AFTER: dict[tuple[Any, str], Callable[..., _Shape | None]] = {
    (mx.array, "reshape"): _reshaped,
    (mx.array, "transpose"): _transposed,
    (mx.array, "squeeze"): _squeezed,
    (mx, "expand_dims"): _expanded,
}
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_IN_PLACE = [(mx.array, "__setitem__"), *((mx.array, f"__i{name}__") for name in (*_ARITHMETIC, *_BITWISE))]
