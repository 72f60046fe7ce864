"""Loads an optimized BLAS for MLX's CPU backend on Linux.

MLX's Linux wheels are linked to the reference BLAS, which is about 40 times slower than OpenBLAS. The dynamic linker
searches for a symbol in the global scope before it searches MLX's own dependencies. Therefore, an OpenBLAS that is
loaded with ``RTLD_GLOBAL`` *before* MLX replaces the reference BLAS. This module never imports MLX, which would be too
early.
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
# OpenBLAS threads spin while they wait for the next product, for 2^26 cycles (26 ms) by default. Meanwhile, other
# operations need those cores, such as attention on two streams.
_THREAD_TIMEOUT = "15"
# Function with which MLX multiplies float32 matrices. The library that provides this symbol is the BLAS in use.
_PROBE = "cblas_sgemm"
# Maps a function that only one library has to the library's name. The reference BLAS has none of these functions.
_FAMILIES = {
    "openblas_get_config": "OpenBLAS",
    "MKL_Get_Version_String": "MKL",
    "bli_info_get_version_str": "BLIS",
    "armplversion": "Arm Performance Libraries",
}


@dataclass(frozen=True, kw_only=True)
class BlasInfo:
    """BLAS that computes MLX's matrix products on the CPU.

    Attributes:
        name: name of the library, e.g. ``OpenBLAS``.
        version: version of the library, for OpenBLAS with the CPU it is optimized for; empty if unknown.
        path: path of the library. Empty on macOS, and if MLX uses the BLAS that it is linked to.
        threads: number of threads; None if the library does not report it.
        optimized: True if the library is known to be fast.
        problem: reason why no optimized BLAS is in use; empty if ``optimized``.
    """

    name: str
    version: str = ""
    path: str = ""
    threads: int | None = None
    optimized: bool
    problem: str = ""

    @property
    def description(self) -> str:
        """Description in one line: ``OpenBLAS 0.3.34 (SkylakeX), 8 threads``."""
        line = f"{self.name} {self.version}".strip()
        if self.threads is not None:
            line += f", {self.threads} thread{'s' if self.threads != 1 else ''}"
        return line if self.optimized else f"{line} (not optimized)"


@functools.cache
def load_optimized_blas() -> BlasInfo:
    """Make MLX use an optimized BLAS, and describe the BLAS in use. Call it before anything imports MLX.

    Only Linux needs this, because MLX uses Accelerate on macOS. ``METAL_ENGINE_BLAS`` may name a library to use instead
    of the installed OpenBLAS, or be ``none`` to keep MLX's own BLAS.

    Without an optimized BLAS, MLX is slow but correct. Therefore, a failure to load one does not raise: it is logged as
    a warning and recorded in the result's ``problem``.

    The first call decides for the process. Later calls return the same result.
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

    # OpenBLAS reads this variable when it is loaded.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", _THREAD_TIMEOUT)
    problem = ""
    if _mlx_library() is not None:
        problem = "MLX was imported before load_optimized_blas() was called; call it first"
    elif (earlier := blas_in_use()) is None:
        try:
            # If the user's library fails, no other one is loaded: the user might not notice.
            _load(choice) if choice else _load_any()
        except (BlasError, OSError) as error:
            problem = f"{BLAS_VARIABLE}={choice} cannot be loaded: {error}" if choice else str(error)
    elif choice:
        # MLX uses the first library in the global scope, so loading another library would have no effect.
        logger.warning("%s=%s is ignored: %s was loaded before it", BLAS_VARIABLE, choice, earlier)

    info = _describe(problem)
    if info.optimized:
        logger.debug("BLAS: %s from %s", info.description, info.path)
    else:
        logger.warning("Matrix products on the CPU will be slow, with %s: %s", info.name, info.problem)
    return info


def blas_in_use() -> str | None:
    """Return the path of the library that computes MLX's matrix products, according to the dynamic linker (Linux).

    Before MLX is loaded, return the library that MLX will use; None if this is the library that MLX is linked to.
    """
    address = symbol_address(ctypes.CDLL(None), _PROBE)
    provider = library_at(address) if address is not None else None
    mlx = _mlx_library()
    if mlx is None:
        return provider
    # Python binds all symbols of an extension module when it loads the module. Libraries loaded later have no effect.
    order = loaded_libraries()
    if provider in order and order.index(provider) < order.index(mlx):
        return provider
    address = symbol_address(ctypes.CDLL(mlx, mode=os.RTLD_NOW | os.RTLD_NOLOAD), _PROBE)
    return library_at(address) if address is not None else None


def _mlx_library() -> str | None:
    return next((path for path in loaded_libraries() if path.endswith("/libmlx.so")), None)


def _describe(problem: str) -> BlasInfo:
    """Describe the library in use, which may differ from the library just loaded.

    ``problem`` is the reason why no optimized BLAS was loaded, or empty. It is ignored if the library in use is
    optimized nevertheless.
    """
    path = blas_in_use()
    if path is None:
        return BlasInfo(name=_MLX_BLAS, optimized=False, problem=problem or f"nothing provides {_PROBE}")
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as error:  # the program itself provides the symbol
        return BlasInfo(name=path, path=path, optimized=False, problem=problem or str(error))
    family = next((name for symbol, name in _FAMILIES.items() if symbol_address(library, symbol)), None)
    if family is None:
        problem = problem or "it is not a library that is known to be fast"
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
    """Load the OpenBLAS of the installed package, or else the system's. Raises BlasError if neither can be loaded."""
    try:
        _load_packaged()
    except (BlasError, OSError) as packaged:
        try:
            _load(_SYSTEM_LIBRARY)
        except (BlasError, OSError) as system:
            raise BlasError(f"{packaged}; and the system's OpenBLAS cannot be loaded: {system}") from packaged
        logger.info("Using the system's OpenBLAS: %s", packaged)


def _load_packaged() -> None:
    packaged = find_packaged()
    try:
        _load(standard_copy(packaged, cache_dir() / "blas"))
    except OSError as error:
        # The directory is read-only, full, mounted noexec, or writable for other users. A loaded library does not need
        # its file any more, so the copy is deleted at once.
        level = logging.WARNING if isinstance(error, NotPrivateError) else logging.INFO
        logger.log(level, "OpenBLAS is copied to a temporary directory, not to the cache: %s", error)
        with tempfile.TemporaryDirectory(prefix="metal-engine-") as private:
            _load(standard_copy(packaged, Path(private)))


def _load(library: str | Path) -> None:
    handle = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    if symbol_address(handle, _PROBE) is None:
        raise BlasError(f"{library} has no {_PROBE}")
