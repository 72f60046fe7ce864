"""Tests of views that are merged while a step is traced: the same elements with fewer operations."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_engine.runner import view_fusion as module
from metal_engine.runner.view_fusion import fused_views

NAMES = ("reshape", "transpose", "squeeze")


def num_operations(array: mx.array, folder: Path) -> int:
    mx.export_to_dot(str(folder / "graph.dot"), array)
    return (folder / "graph.dot").read_text().count("label =")


def elements(*shape: int) -> mx.array:
    array = mx.arange(int(np.prod(shape))).reshape(shape)
    mx.eval(array)
    return array


@given(st.data())
def test_fused_views_keep_the_shape_and_elements(data: st.DataObject) -> None:
    """Holds for any sequence of views, including views that move elements."""
    array = elements(*data.draw(st.permutations([1, 1, 2, 3, 4])))
    expected, earlier = np.array(array), []
    with fused_views():
        for _ in range(data.draw(st.integers(1, 5))):
            kind = data.draw(st.sampled_from(["reshape", "transpose", "squeeze", "expand", "change", "change others"]))
            earlier.append(array)
            if kind == "reshape":
                shape = data.draw(st.sampled_from([(24,), (6, 4), (1, 24), (2, 3, 4), (2, -1, 1, 3), (4, 1, 6)]))
                array = array.reshape(shape) if data.draw(st.booleans()) else array.reshape(*shape)
                expected = expected.reshape(shape)
            elif kind == "transpose":
                axes = data.draw(st.permutations(range(array.ndim)))
                given_axes = [axis - array.ndim if data.draw(st.booleans()) else axis for axis in axes]
                array = array.transpose(given_axes) if data.draw(st.booleans()) else array.transpose(*given_axes)
                expected = expected.transpose(axes)
            elif kind == "squeeze" and 1 in array.shape:
                axis = data.draw(st.sampled_from([i for i, n in enumerate(array.shape) if n == 1]))
                array = array.squeeze(axis - array.ndim if data.draw(st.booleans()) else axis)
                expected = expected.squeeze(axis)
            elif kind == "expand":
                axis = data.draw(st.integers(-array.ndim - 1, array.ndim))
                array, expected = mx.expand_dims(array, axis), np.expand_dims(expected, axis)
            elif kind == "change":
                expected = expected.copy()
                array[0], expected[0] = -1, -1
            elif kind == "change others":
                for other in earlier:
                    if other is not array:
                        other[0] = -2
    assert array.shape == expected.shape
    np.testing.assert_array_equal(np.array(array), expected)


def test_view_chains_of_a_layer_fuse_into_one_operation(tmp_path: Path) -> None:
    """Checked for the rows from a linear layer, and for the output of attention."""
    rows, attended = elements(5, 1, 12), elements(5, 3, 4)

    def heads() -> mx.array:
        return rows.reshape(5, 1, 3, -1).transpose(0, 2, 1, 3).squeeze(2)

    def output() -> mx.array:
        return mx.expand_dims(attended, 2).transpose(0, 2, 1, 3).reshape(5, 1, -1)

    for make in (heads, output):
        assert num_operations(make(), tmp_path) == 3
        with fused_views():
            merged = make()
        assert num_operations(merged, tmp_path) == 1
        assert mx.array_equal(merged, make())


def test_view_calls_that_cannot_be_fused_fall_back_to_mlx() -> None:
    array = elements(2, 1, 1, 3)
    with fused_views():
        assert array.squeeze().shape == (2, 3) and array.squeeze([1, 2]).shape == (2, 3)
        assert mx.expand_dims(array, [0, 1]).shape == (1, 1, 2, 1, 1, 3)
        assert mx.expand_dims(array, axis=0).shape == (1, 2, 1, 1, 3)
        assert array.transpose().shape == (3, 1, 1, 2)
        assert array.reshape(3, 2, stream=mx.cpu).shape == (3, 2)
        with pytest.raises(ValueError, match="squeeze"):
            array.squeeze(0)
        with pytest.raises(ValueError, match="reshape"):
            array.reshape(5)


# By the name of the method of an array.
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    f"__{name}__": getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "imatmul", "ipow", "iand", "ior", "ixor")
} | {"__ilshift__": operator.ilshift, "__irshift__": operator.irshift}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_view_that_is_changed_in_place(name: str) -> None:
    """Later views use the changed elements."""

    def result() -> mx.array:
        values = elements(1, 3, 3) + 1
        array = (values.astype(mx.float32) if name in ("__itruediv__", "__imatmul__") else values).reshape(3, 3)
        other = mx.eye(3) * 2 if name == "__imatmul__" else mx.array(2).astype(array.dtype)
        array = IN_PLACE[name](array, other)
        return array.reshape(9)

    with fused_views():
        merged = result()
    assert mx.array_equal(merged, result())


def test_every_in_place_array_method_is_handled() -> None:
    others = {"__init__", "__iter__", "__int__", "__index__", "__invert__", "__init_subclass__"}
    changes = {name for name in dir(mx.array) if name.startswith("__i")} - others
    assert changes | {"__setitem__"} == {name for _, name in module._IN_PLACE} == {*IN_PLACE, "__setitem__"}


def test_other_threads_have_mlxs_own(tmp_path: Path) -> None:
    array, made = elements(2, 1, 3), []
    with fused_views():
        thread = threading.Thread(target=lambda: made.append(array.transpose(1, 0, 2).reshape(6)))
        thread.start()
        thread.join()
    assert num_operations(made[0], tmp_path) == 2


def test_mlx_array_methods_are_restored_after_an_error() -> None:
    before = [getattr(mx.array, name) for name in (*NAMES, *(name for _, name in module._IN_PLACE))]
    with pytest.raises(RuntimeError, match="this"), fused_views():
        assert getattr(mx.array, NAMES[0]) is not before[0]
        raise RuntimeError("this")
    assert [getattr(mx.array, name) for name in (*NAMES, *(name for _, name in module._IN_PLACE))] == before
    assert not module._one_trace_at_a_time.locked()


def test_traces_of_two_threads_run_one_at_a_time() -> None:
    entered, leave = threading.Event(), threading.Event()

    def trace() -> None:
        with fused_views():
            entered.set()
            leave.wait(60)

    before, first = mx.array.reshape, threading.Thread(target=trace)
    first.start()
    assert entered.wait(60)
    entered.clear()
    second = threading.Thread(target=trace)
    second.start()
    assert not entered.wait(0.2)
    leave.set()
    first.join()
    second.join()
    assert entered.is_set() and mx.array.reshape is before
