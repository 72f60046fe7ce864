"""Functions of a few operations, which MLX compiles into one loop for each combination of shapes."""

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
    """A ``function`` of arrays that is compiled separately for each stream and each combination of shapes.

    ``mx.compile`` itself keeps all compilations and searches them linearly, while the shapes of a step change with
    every token. This class compiles each combination with its own function object, and drops the least recently used
    compilation. Tracing takes about 0.3 ms. The machine code is the same for all shapes.

    Args:
        function: function of arrays that returns an array. The result must depend only on the arguments.
        max_shapes: maximum number of compilations in each thread. MLX keeps compilations per thread.
    """

    def __init__(self, function: Callable[..., mx.array], max_shapes: int = 128) -> None:
        self._of_thread = _Compilations(function, max_shapes)

    def __call__(self, *arrays: mx.array) -> mx.array:
        _warn_without_compiler()
        # A compilation always uses the stream of its tracing.
        stream = str(mx.default_stream(mx.default_device()))
        return self._of_thread.compiled(stream, *[array.shape for array in arrays])(*arrays)


class _Compilations(threading.local):
    """Compilations of one thread. ``compiled(stream, *shapes)`` returns the compiled function."""

    def __init__(self, function: Callable[..., mx.array], max_shapes: int) -> None:
        # Each compilation has its own function object, by which MLX distinguishes compilations.
        self.compiled = functools.lru_cache(max_shapes)(lambda *_: mx.compile(lambda *a: function(*a)))


@functools.cache
def _warn_without_compiler() -> None:
    if sys.platform == "linux" and shutil.which("g++") is None:
        logger.warning(
            "g++ is not installed, so MLX cannot compile elementwise operations: they take two to three times as long"
        )


@functools.cache
def keep_kernels_private() -> None:
    """Prevent MLX from loading machine code that another user could have written. Call it before anything computes.

    On Linux, MLX's kernels for the CPU get a private folder. If no folder is private, MLX's compiler is disabled in
    this process, with a warning. Does nothing on other systems.
    """
    if sys.platform != "linux":
        return
    try:
        use_private_kernel_folder()
    except NotPrivateError as error:
        mx.disable_compile()
        logger.warning(
            "MLX's compiler is disabled, which makes elementwise operations two to three times slower. Its output "
            "requires a folder to which no other user can write: %s",
            error,
        )
