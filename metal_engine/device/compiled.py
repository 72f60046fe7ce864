"""Functions of a few operations, compiled by MLX into one loop for each combination of shapes in use."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
import threading
from collections.abc import Callable

import mlx.core as mx

from metal_engine.device.kernel_folder import use_private_kernel_folder
from metal_engine.device.private_folder import NotPrivateError

logger = logging.getLogger(__name__)


class CompiledByShape:
    """``function`` of arrays, compiled for each combination of shapes it is called with, and each stream.

    ``mx.compile`` by itself keeps all it has ever seen and looks for one by going through them, and the shapes of a
    step change with every token. Here each combination has a compilation of its own, and the least recently used
    one is dropped. Tracing takes about 0.3 ms; the machine code is the same for all shapes.

    Args:
        function: takes and returns arrays; it is to depend on nothing else.
        max_shapes: compilations kept, in each thread (MLX keeps them by thread, too).
    """

    def __init__(self, function: Callable[..., mx.array], max_shapes: int = 128) -> None:
        self._of_thread = _Compilations(function, max_shapes)

    def __call__(self, *arrays: mx.array) -> mx.array:
        _warn_without_compiler()
        # Its operations stay on the stream that they were traced on.
        stream = str(mx.default_stream(mx.default_device()))
        return self._of_thread.compiled(stream, *[array.shape for array in arrays])(*arrays)


class _Compilations(threading.local):
    """Made anew in each thread that uses it: ``compiled`` of a stream and shapes gives the function for them."""

    def __init__(self, function: Callable[..., mx.array], max_shapes: int) -> None:
        # A function object of its own for each: MLX tells compilations apart by it.
        self.compiled = functools.lru_cache(max_shapes)(lambda *_: mx.compile(lambda *a: function(*a)))


@functools.cache
def _warn_without_compiler() -> None:
    if sys.platform == "linux" and shutil.which("g++") is None:
        logger.warning(
            "there is no g++, with which MLX compiles elementwise operations: they take two to three times as long"
        )


@functools.cache
def keep_kernels_private() -> None:
    """See to it that MLX loads no machine code that another user could have written. Call it before anything computes.

    On Linux MLX's kernels for the CPU get a folder of this user's own; where there is none, MLX compiles nothing any
    more, in this whole process, and a warning says so. Elsewhere nothing changes.
    """
    if sys.platform != "linux":
        return
    try:
        use_private_kernel_folder()
    except NotPrivateError as error:
        mx.disable_compile()
        logger.warning(
            "MLX compiles no elementwise operations, and they take two to three times as long: there is no folder "
            "that other users cannot write to for its machine code: %s",
            error,
        )
