"""Functions for all Metal kernels of this package: they load the kernels' source, and prepare inputs."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np

# Types of arrays that kernels read and write.
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# MLX puts inputs with fewer elements into constant memory, and compiles another variant of the kernel for them at first
# use, which would be while serving. Therefore, the tables of small steps are padded to this size.
DEVICE_ELEMENTS = 8
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.M)


def kernel_text(name: str) -> str:
    """Return the source of a kernel: the file ``name`` in the folder ``kernels`` of the package or of the checkout.

    A line ``#include "name"`` is replaced by that file's text, because MLX compiles a single text without a folder.

    Raises:
        FileNotFoundError: neither folder has the file, or an included file.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / name).exists():
            return _INCLUDE.sub(lambda line: kernel_text(line[1]), (folder / name).read_text())
    raise FileNotFoundError(f"kernel {name} is not installed with metal_engine")


def on_device(table: np.ndarray) -> mx.array:
    """Return a table [rows, columns] as an MLX array, padded with rows of zeros to at least DEVICE_ELEMENTS elements.

    No kernel reads the padding.
    """
    missing = max(0, DEVICE_ELEMENTS - table.size)
    rows = -(-missing // table.shape[1])
    return mx.array(np.pad(table, ((0, rows), (0, 0))) if rows else table)
