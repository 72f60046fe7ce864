"""What our Metal kernels have in common: where their source lies, and what MLX makes of their inputs."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx

# Of what kernels read and write.
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# MLX puts inputs with fewer elements into constant memory, and compiles another variant of the kernel for them when it
# first meets one: in the middle of serving. So the tables of small steps are padded to this.
DEVICE_ELEMENTS = 8
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.M)


def kernel_text(name: str) -> str:
    """Source of a kernel: inside the installed package, else beside it in a checkout.

    A line ``#include "name"`` stands for another file's text: MLX compiles one text, without a folder.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / name).exists():
            return _INCLUDE.sub(lambda line: kernel_text(line[1]), (folder / name).read_text())
    raise FileNotFoundError(f"kernel {name} is not installed with metal_engine")
