"""While a step is traced, a view of a view is made as one of what that is a view of.

mlx-lm's layers reshape, transpose and squeeze rows of one token, one after the other, and none of it moves an element.
Each is a node of the graph and costs the host over a microsecond in every replay. MLX joins the arithmetic of a trace,
and not its views. So they are joined as they are made, once for a trace.
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
    """Merge the views that this thread makes; other threads make theirs as ever."""
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
    """The views that a thread has made, and of what: an array with the same elements in the same order."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._bases: dict[int, tuple[mx.array, mx.array]] = {}  # by a view's id, with the view: it keeps its id so

    def function(self, original: _Function, shape_after: Callable[..., _Shape | None] | None) -> _Function:
        """What takes the place of a function of an array.

        Args:
            shape_after: the shape of what it makes, from the array's and the arguments; None if that is not to be
                merged. No function: ``original`` changes what the array stands for.
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
            base = _reshape(array, array.shape)  # an object that nobody else has, and changes: no operation
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
