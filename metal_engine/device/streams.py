"""MLX's streams belong to the thread that made them, and must not outlive it."""

from __future__ import annotations

import logging
import threading

import mlx.core as mx

logger = logging.getLogger(__name__)

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


def settle_streams() -> None:
    """Wait until the thread's streams have done all their work, and drop the errors that they met.

    For a thread that goes on with something else, where these must not come up.
    """
    for stream in (mx.default_stream(mx.default_device()), vars(_of_thread).get("second")):
        if stream is not None:
            try:
                mx.synchronize(stream)
            except Exception as error:  # noqa: BLE001  (its cause has been told)
                logger.debug("a stream has met an error: %s", error)


def end_streams_of_thread() -> None:
    """Close the streams of the calling thread, which is about to end.

    Streams left open sometimes abort the process when it exits. The main thread keeps its own: it lives on and may
    compute again.
    """
    if threading.current_thread() is not threading.main_thread():
        vars(_of_thread).pop("second", None)
        mx.clear_streams()
