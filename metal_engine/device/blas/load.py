"""An optimized BLAS for MLX's CPU backend on Linux.

MLX's Linux wheels link the reference BLAS, some 40 times slower than OpenBLAS. The dynamic linker looks a
symbol up in the global scope before it looks in MLX's own dependencies, so an OpenBLAS that is loaded with
``RTLD_GLOBAL`` *before* MLX takes its place. This module never imports MLX, which would be too early.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from metal_engine.device.blas.dynamic_linker import library_at, loaded_libraries, symbol_address
from metal_engine.device.blas.openblas_copy import BlasError, find_packaged, standard_copy
from metal_engine.device.cache_dir import cache_dir
from metal_engine.device.private_folder import NotPrivateError

logger = logging.getLogger(__name__)

BLAS_VARIABLE = "METAL_ENGINE_BLAS"

_MLX_BLAS = "MLX's own BLAS"
_SYSTEM_LIBRARY = "libopenblas.so.0"
# OpenBLAS's threads wait for the next product by spinning, for 2^26 cycles (26 ms) unless told otherwise. Meanwhile
# other operations run, attention on two streams among them, and need those cores.
_THREAD_TIMEOUT = "15"
# What MLX multiplies float32 matrices with: whoever provides this symbol is the BLAS in use.
_PROBE = "cblas_sgemm"
# A function that only this library has -> its name. The reference BLAS has none of them.
_FAMILIES = {
    "openblas_get_config": "OpenBLAS",
    "MKL_Get_Version_String": "MKL",
    "bli_info_get_version_str": "BLIS",
    "armplversion": "Arm Performance Libraries",
}


@dataclass(frozen=True, kw_only=True)
class BlasInfo:
    """The BLAS behind MLX's matrix products on the CPU.

    ``path`` is empty where MLX will use what it was linked with; ``threads`` is None where the library does
    not say. ``problem`` is empty if ``optimized``, and says why not otherwise.
    """

    name: str
    version: str = ""
    path: str = ""
    threads: int | None = None
    optimized: bool
    problem: str = ""

    @property
    def description(self) -> str:
        """One line for people: ``OpenBLAS 0.3.34 (SkylakeX), 8 threads``."""
        line = f"{self.name} {self.version}".strip()
        if self.threads is not None:
            line += f", {self.threads} thread{'s' if self.threads != 1 else ''}"
        return line if self.optimized else f"{line} (not optimized)"


@functools.cache
def load_optimized_blas() -> BlasInfo:
    """Make MLX use an optimized BLAS, and say which one it is. Call it before anything imports MLX.

    Only Linux needs this; on macOS MLX has Accelerate. ``METAL_ENGINE_BLAS`` may name a library to use in
    place of the installed OpenBLAS, or be ``none`` to keep what MLX was linked with. Nothing here is fatal:
    without an optimized BLAS MLX is slow but right, so a failure is logged as a warning and noted in the
    result.

    The first call decides for the process; later ones return the same answer.
    """
    if sys.platform == "darwin":
        return BlasInfo(name="Accelerate", optimized=True)
    if sys.platform != "linux":
        return BlasInfo(name=_MLX_BLAS, optimized=False, problem=f"not supported on {sys.platform}")

    choice = os.environ.get(BLAS_VARIABLE, "").strip()
    if choice.lower() == "none":
        info = _describe(problem=f"switched off by {BLAS_VARIABLE}={choice}")
        logger.info("BLAS: %s: %s", info.description, info.problem)
        return info

    # OpenBLAS reads it when it is loaded.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", _THREAD_TIMEOUT)
    problem = ""
    if _mlx_library() is not None:
        problem = "MLX was imported before load_optimized_blas() was called; call it first"
    elif (earlier := blas_in_use()) is None:
        try:
            # What the user named, or nothing: they might not notice that they got another.
            _load(choice) if choice else _load_any()
        except (BlasError, OSError) as error:
            problem = f"{BLAS_VARIABLE}={choice} cannot be loaded: {error}" if choice else str(error)
    elif choice:
        # The first library in the global scope wins, so loading another one would change nothing.
        logger.warning("%s=%s is ignored: %s was loaded before it", BLAS_VARIABLE, choice, earlier)

    info = _describe(problem)
    if info.optimized:
        logger.debug("BLAS: %s from %s", info.description, info.path)
    else:
        logger.warning("Matrix products on the CPU will be slow, with %s: %s", info.name, info.problem)
    return info


def blas_in_use() -> str | None:
    """Returns the path of the library that MLX's matrix products go to, as the dynamic linker has it (Linux).

    Before MLX is loaded, that is the one it will be bound to; None means the one MLX was linked with.
    """
    address = symbol_address(ctypes.CDLL(None), _PROBE)
    provider = library_at(address) if address is not None else None
    mlx = _mlx_library()
    if mlx is None:
        return provider
    # Python loads an extension module with all its symbols bound at once: what came later made no difference.
    order = loaded_libraries()
    if provider in order and order.index(provider) < order.index(mlx):
        return provider
    address = symbol_address(ctypes.CDLL(mlx, mode=os.RTLD_NOW | os.RTLD_NOLOAD), _PROBE)
    return library_at(address) if address is not None else None


def _mlx_library() -> str | None:
    return next((path for path in loaded_libraries() if path.endswith("/libmlx.so")), None)


def _describe(problem: str) -> BlasInfo:
    """Describes the library that is in use, which may be another than the one just loaded."""
    path = blas_in_use()
    if path is None:
        return BlasInfo(name=_MLX_BLAS, optimized=False, problem=problem or f"nothing provides {_PROBE}")
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as error:  # the program itself provides it
        return BlasInfo(name=path, path=path, optimized=False, problem=problem or str(error))
    family = next((name for symbol, name in _FAMILIES.items() if symbol_address(library, symbol)), None)
    if family is None:
        problem = problem or "it is none of those known to be fast"
        return BlasInfo(name=Path(path).name, path=path, optimized=False, problem=problem)
    if family != "OpenBLAS":
        return BlasInfo(name=family, path=path, optimized=True)
    library.openblas_get_config.restype = ctypes.c_char_p
    library.openblas_get_corename.restype = ctypes.c_char_p
    # "OpenBLAS 0.3.34 DYNAMIC_ARCH NO_AFFINITY ..."
    number = re.search(r"\d+(\.\w+)+", library.openblas_get_config().decode())
    return BlasInfo(
        name=family,
        version=f"{number[0] if number else ''} ({library.openblas_get_corename().decode()})".strip(),
        path=path,
        threads=library.openblas_get_num_threads(),
        optimized=True,
    )


def _load_any() -> None:
    """Load the OpenBLAS of the installed package, or else the system's."""
    try:
        _load_packaged()
    except (BlasError, OSError) as packaged:
        try:
            _load(_SYSTEM_LIBRARY)
        except (BlasError, OSError) as system:
            raise BlasError(f"{packaged}; and the system has none: {system}") from packaged
        logger.info("Using the system's OpenBLAS: %s", packaged)


def _load_packaged() -> None:
    packaged = find_packaged()
    try:
        _load(standard_copy(packaged, cache_dir() / "blas"))
    except OSError as error:
        # The directory is read-only, full, mounted noexec, or others can write to it. A loaded library no longer needs
        # its file's name, so the copy may go at once.
        level = logging.WARNING if isinstance(error, NotPrivateError) else logging.INFO
        logger.log(level, "OpenBLAS is copied to a temporary directory, not to the cache: %s", error)
        with tempfile.TemporaryDirectory(prefix="metal-engine-") as private:
            _load(standard_copy(packaged, Path(private)))


def _load(library: str | Path) -> None:
    handle = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    if symbol_address(handle, _PROBE) is None:
        raise BlasError(f"{library} has no {_PROBE}")
