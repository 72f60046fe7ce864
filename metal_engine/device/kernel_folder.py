"""Private folder for the machine code that MLX compiles for the CPU on Linux.

MLX loads a kernel from ``<temporary folder>/mlx/<version>/cpu/lib<kernel>.so``, whoever wrote that file. It compiles
the kernel only if the file does not exist. The temporary folder is C++'s: the value of the first variable that is set
among TMPDIR, TMP, TEMP and TEMPDIR, or else /tmp. MLX reads the variables each time.

This module sets TEMPDIR, because TEMPDIR affects only C++ programs, not Python, compilers or mktemp. If the user has
set one of the variables, it is kept, and the folder ``mlx`` in the folder that it names is made private instead. If
that ``mlx`` contains files that MLX has not written, ``mlx`` is not changed. The user's variable is then set to a
private folder below its folder.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from metal_engine.device.cache_dir import cache_dir
from metal_engine.device.private_folder import NotPrivateError, check_ours, private_folder

logger = logging.getLogger(__name__)

_OURS = "TEMPDIR"
_VARIABLES = ("TMPDIR", "TMP", "TEMP", _OURS)
# MLX writes paths between double quotes into a shell command.
_NOT_QUOTED = frozenset('"$`\\\n')
_MIN_FREE_BYTES = 16 << 20
# Files that MLX writes below its folder: <version>/cpu/lib<kernel>.so, and its source <kernel>.cpp in the same folder.
# The end of a long name is a hash, which MLX pads with a space.
_VERSION = re.compile(r"\d[\w.+-]*", re.ASCII)
_LIBRARY = re.compile(r"lib[\w ]+\.so", re.ASCII)
_SOURCE = re.compile(r"[\w ]+\.cpp", re.ASCII)
# A truncated library older than this is not being written by another process any more.
_WRITING_SECONDS = 60.0


@functools.cache
def use_private_kernel_folder() -> Path:
    """Make MLX store its kernels in a folder to which no other user can write. Return the folder.

    The first call decides for the process. Call it before MLX compiles the first kernel. Kernels that this process has
    compiled before are loaded already, and stay in use. May set environment variables.

    Raises:
        NotPrivateError: no folder is private and usable. The message has the reasons and names a variable to set.
    """
    given = next((name for name in _VARIABLES if os.environ.get(name) is not None), None)
    if given is not None:
        return _in_users_folder(given, Path(os.environ[given]))
    problems: list[OSError] = []
    # Machines of another kind may share the cache, and need other code. The temporary folder is local, but the system
    # may clean it up.
    for place in (lambda: cache_dir() / "kernels" / _kind_of_machine(), _in_temporary_folder):
        try:
            folder = _fit_for_code(private_folder(place()))
        except OSError as error:
            problems.append(error)
            continue
        for problem in problems:
            level = logging.WARNING if isinstance(problem, NotPrivateError) else logging.INFO
            logger.log(level, "MLX's compiled kernels go to %s, not to the cache: %s", folder, problem)
        os.environ[_OURS] = str(folder)
        return folder / "mlx"
    raise NotPrivateError(f"{'; '.join(map(str, problems))} (METAL_ENGINE_CACHE names another folder)")


def _in_users_folder(variable: str, folder: Path) -> Path:
    try:
        if not os.environ[variable] or not folder.is_dir():
            raise NotPrivateError(f"{str(folder)!r} is not a folder")
        other = _other_thing(folder / "mlx")
        if other is None:
            return _fit_for_code(private_folder(folder / "mlx"))
        own = _fit_for_code(private_folder(folder / _name_of_ours()))
    except OSError as error:
        raise NotPrivateError(f"{error} ({variable} names another folder)") from error
    logger.warning("MLX's compiled kernels go to %s, to which %s is now set: %s is not MLX's", own, variable, other)
    tempfile.gettempdir()  # caches the current folder for this process's other temporary files
    os.environ[variable] = str(own)
    return own / "mlx"


def _other_thing(folder: Path) -> Path | None:
    """Return the path of a file or folder below ``folder`` that MLX has not written; None if there is none.

    Also return None if ``folder`` is missing, is not a folder or belongs to another user.
    """
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return None  # private_folder rejects it
    return next((path for path, status in _contents(folder) if not _is_of_mlx(path.relative_to(folder), status)), None)


def _is_of_mlx(path: Path, status: os.stat_result) -> bool:
    """Return True if a path relative to MLX's folder has the form of a file or folder that MLX writes.

    Examples are ``0.30.1``, ``0.30.1/cpu`` and ``0.30.1/cpu/libkernel.so``.
    """
    version, *rest = path.parts
    if not _VERSION.fullmatch(version) or rest[:1] not in ([], ["cpu"]) or len(rest) > 2:
        return False
    if len(rest) < 2:
        return stat.S_ISDIR(status.st_mode)
    is_named = _LIBRARY.fullmatch(rest[1]) or _SOURCE.fullmatch(rest[1])
    return stat.S_ISREG(status.st_mode) and is_named is not None


def _kind_of_machine() -> str:
    return f"{platform.machine()}-{os.confstr('CS_GNU_LIBC_VERSION') or 'libc'}".replace(" ", "-")


def _in_temporary_folder() -> Path:
    return Path(tempfile.gettempdir(), _name_of_ours())


def _name_of_ours() -> str:
    return f"metal-engine-{os.geteuid()}"


def _fit_for_code(folder: Path) -> Path:
    """Check that MLX can write and load libraries in a folder, and that only this user can write the existing files.

    Deletes truncated libraries, and protects the folder from cleanup. Return the folder.

    Raises:
        NotPrivateError: other users may have written some of the files.
        OSError: MLX cannot use the folder.
    """
    if _NOT_QUOTED & set(str(folder)):
        raise OSError(f"{folder} has characters in its name that MLX does not pass on to the compiler")
    system = os.statvfs(folder)
    if system.f_flag & os.ST_NOEXEC:
        raise OSError(f"{folder} is on a file system from which no code may be loaded (noexec)")
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} is read-only")
    if system.f_bavail * system.f_frsize < _MIN_FREE_BYTES:
        raise OSError(f"{folder} has no space left")
    for path, status in _contents(folder):
        check_ours(path, status)
        if _is_library(path, status) and time.time() - status.st_mtime > _WRITING_SECONDS:
            _remove_if_cut_short(path, status.st_size)
    _keep(folder)
    return folder


def _contents(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the path and the status of everything in a folder and below it, without following links.

    Skips files that other processes remove meanwhile.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # a compiler's temporary file
                continue
            yield Path(entry.path), status
            if stat.S_ISDIR(status.st_mode):
                yield from _contents(Path(entry.path))


def _is_library(path: Path, status: os.stat_result) -> bool:
    """Return True if a path has the form of a library that MLX compiles, e.g. ``.../mlx/0.30.1/cpu/libkernel.so``."""
    if len(path.parts) < 5 or path.parts[-4] != "mlx" or not _LIBRARY.fullmatch(path.name):
        return False
    return _is_of_mlx(Path(*path.parts[-3:]), status)


def _remove_if_cut_short(path: Path, size: int) -> None:
    """Delete a library of ``size`` bytes if it is truncated: its compiler was killed. MLX could never load it."""
    with path.open("rb") as file:
        header = file.read(64)
    # Compilers write the section table last. Its place is in e_shoff, e_shentsize and e_shnum of a 64-bit ELF header.
    end = int.from_bytes(header[40:48], "little")
    end += int.from_bytes(header[58:60], "little") * int.from_bytes(header[60:62], "little")
    if len(header) < 64 or not header.startswith(b"\x7fELF") or end > size:
        path.unlink(missing_ok=True)


def _keep(folder: Path) -> None:
    """Lock the folder until this process ends. The system's cleanup of temporary folders skips locked folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # a network file system, which has no such cleanup
        os.close(descriptor)
