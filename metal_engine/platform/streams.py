"""MLX's streams belong to the thread that made them, and must not outlive it."""

from __future__ import annotations

import threading

import mlx.core as mx


def end_streams_of_thread() -> None:
    """Close the streams of a thread that is about to end: left open, they abort the process, now and then, when it
    exits. The main thread keeps its own, for it lives on and may compute again.
    """
    if threading.current_thread() is not threading.main_thread():
        mx.clear_streams()
