"""Tests that each combination of shapes has a compilation, and that their number is limited."""

from __future__ import annotations

import gc
import threading
import weakref

import mlx.core as mx

from metal_engine.device.compiled import CompiledByShape
from metal_engine.device.streams import end_streams_of_thread, second_stream, synchronize


def test_compiled_functions_stay_correct_when_shapes_are_evicted() -> None:
    """A later function never gets a dropped compilation of another function."""
    traced = 0

    def add(x: mx.array, y: mx.array) -> mx.array:
        nonlocal traced
        traced += 1
        return x * 2 + y

    def subtract(x: mx.array, y: mx.array) -> mx.array:
        return x * 2 - y

    adds, subtracts = CompiledByShape(add, max_shapes=4), CompiledByShape(subtract, max_shapes=2)
    for n in [*range(1, 12), *range(11, 0, -1)]:
        x, y = mx.arange(n).astype(mx.float32), mx.full((1,), 5.0)
        assert mx.array_equal(adds(x, y), x * 2 + 5) and mx.array_equal(subtracts(x, y), x * 2 - 5)
    assert traced == 22 - 4  # on the way back, the last four were still cached
    before = traced
    adds(mx.zeros((1,)), mx.zeros((1,)))
    assert traced == before


def test_streams_have_compilations_of_their_own() -> None:
    """Otherwise, an operation traced on one stream would run there for other streams too."""
    traced = []

    def double(x: mx.array) -> mx.array:
        traced.append(mx.default_stream(mx.default_device()))
        return x + x

    doubles = CompiledByShape(double)
    streams = [mx.default_stream(mx.default_device()), second_stream()]
    for stream in streams * 3:
        with mx.stream(stream):
            assert doubles(mx.array(2)).item() == 4
    assert traced == streams


def test_a_dropped_one_is_freed() -> None:
    class Function:
        def __call__(self, x: mx.array) -> mx.array:
            return x + 1

    function = Function()
    compiled = CompiledByShape(function)
    compiled(mx.zeros((2,)))
    gone = weakref.ref(function)
    del function, compiled
    gc.collect()
    assert gone() is None


def test_threads_compile_for_themselves() -> None:
    doubles = CompiledByShape(lambda x: x + x)
    results: list[bool] = []

    def run() -> None:
        for n in range(1, 20):
            x = mx.arange(n)
            results.append(bool(mx.array_equal(doubles(x), x * 2)))
        end_streams_of_thread()

    for _ in range(3):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    x = mx.arange(7)
    assert mx.array_equal(doubles(x), x * 2) and all(results) and len(results) == 57


def test_a_second_stream_that_has_ended_is_not_used_again() -> None:
    results = []

    def run() -> None:
        for _ in range(2):
            with mx.stream(second_stream()):
                results.append((mx.array(2) + 2).item())
            synchronize()
            end_streams_of_thread()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results == [4, 4]
