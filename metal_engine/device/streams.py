"""MLX streams of a thread. A thread creates its own streams, and must close them before it ends."""

from __future__ import annotations

import threading

import mlx.core as mx

_of_thread = threading.local()


def second_stream() -> mx.Stream:
    """Return the thread's second CPU stream. The first call creates it."""
    if not hasattr(_of_thread, "second"):
        _of_thread.second = mx.new_stream(mx.cpu)
    return _of_thread.second


def synchronize() -> None:
    """Wait until the thread's streams have completed all work and released their inputs.

    Raises the error of an operation that has failed since the last call. A stream keeps the error until then.
    """
    try:
        mx.synchronize()
    finally:
        if hasattr(_of_thread, "second"):
            mx.synchronize(_of_thread.second)


def end_streams_of_thread() -> None:
    """Close the streams of the calling thread, which is about to end.

    Streams that stay open sometimes abort the process at its exit. The main thread keeps its streams, because it may
    compute again.
    """
    if threading.current_thread() is not threading.main_thread():
        vars(_of_thread).pop("second", None)
        mx.clear_streams()
