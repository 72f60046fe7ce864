"""MLX's streams belong to the thread that made them, and must not outlive it."""

from __future__ import annotations

import threading

import mlx.core as mx

_of_thread = threading.local()


def second_stream() -> mx.Stream:
    """Returns the CPU stream that a thread has beside its default one; the first call makes it."""
    if not hasattr(_of_thread, "second"):
        _of_thread.second = mx.new_stream(mx.cpu)
    return _of_thread.second


def synchronize() -> None:
    """Wait until the thread's streams have done all their work and let go of what they read.

    A stream keeps an error that it met until somebody waits for the stream; this raises it.
    """
    try:
        mx.synchronize()
    finally:
        if hasattr(_of_thread, "second"):
            mx.synchronize(_of_thread.second)


def end_streams_of_thread() -> None:
    """Close the streams of the calling thread, which is about to end.

    Streams left open sometimes abort the process when it exits. The main thread keeps its own: it lives on and may
    compute again.
    """
    if threading.current_thread() is not threading.main_thread():
        vars(_of_thread).pop("second", None)
        mx.clear_streams()
