"""Functions of a few operations, compiled by MLX into one loop for each combination of shapes in use."""

from __future__ import annotations

import functools
import logging
import shutil
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable

import mlx.core as mx

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
        self._function = function
        self._max_shapes = max_shapes
        self._of_thread = threading.local()

    def __call__(self, *arrays: mx.array) -> mx.array:
        _warn_without_compiler()
        compiled: OrderedDict[object, Callable[..., mx.array]] = vars(self._of_thread).setdefault(
            "compiled", OrderedDict()
        )
        # Its operations stay on the stream that they were traced on.
        key = (str(mx.default_stream(mx.default_device())), *[array.shape for array in arrays])
        if key in compiled:
            compiled.move_to_end(key)
        else:
            # A function object of its own: MLX tells compilations apart by it.
            compiled[key] = mx.compile(lambda *a: self._function(*a))
            if len(compiled) > self._max_shapes:
                compiled.popitem(last=False)
        return compiled[key](*arrays)


@functools.cache
def _warn_without_compiler() -> None:
    if sys.platform == "linux" and shutil.which("g++") is None:
        logger.warning(
            "there is no g++, with which MLX compiles elementwise operations: they take two to three times as long"
        )
