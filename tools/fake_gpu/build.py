"""Compiles device.cpp with MLX's headers and stores the library in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from metal_engine.device.cache_dir import cache_dir
from metal_engine.device.private_folder import NotPrivateError, private_folder

SOURCE = Path(__file__).with_name("device.cpp")
# Flags of mlx-cpu's wheels. Other flags could change the layout of its classes.
_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra")
_COMPILERS = ("g++", "clang++", "c++")


class FakeGpuError(RuntimeError):
    """Raised if the fake GPU cannot run on this machine: unsupported MLX or machine, or no compiler."""


def compiler() -> str:
    """Return the path of a C++ compiler.

    Raises:
        FakeGpuError: no compiler was found. The message has the package to install.
    """
    given = os.environ.get("CXX")
    for name in (given,) if given else _COMPILERS:
        if path := shutil.which(name):
            return path
    missing = f"CXX names {given}, which was not found" if given else f"none of {', '.join(_COMPILERS)} was found"
    raise FakeGpuError(f"the fake GPU needs a C++20 compiler, and {missing}: on Debian or Ubuntu, apt-get install g++")


def build(mlx: Path, version: str) -> Path:
    """Return the compiled library, from the cache if it has been compiled before.

    Args:
        mlx: folder of the mlx package.
        version: version of MLX.

    Raises:
        FakeGpuError: no compiler was found, compilation failed, or other users could write to the cache folder.
    """
    path = compiler()
    parts = [SOURCE.read_text(), version, path, " ".join(_FLAGS), platform.machine(), str(mlx)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        folder = private_folder(cache_dir() / "fake_gpu")
    except NotPrivateError as error:
        raise FakeGpuError(f"code is not loaded from the cache: {error} (METAL_ENGINE_CACHE names another)") from error
    library = folder / f"{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / "device.so"
        command = [path, *_FLAGS, f"-I{mlx / 'include'}", str(SOURCE), "-o", str(made), f"-L{mlx / 'lib'}", "-lmlx"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise FakeGpuError(f"the fake GPU does not compile:\n{done.stderr}")
        os.replace(made, library)  # atomic: other processes never see a partial file
    return library
