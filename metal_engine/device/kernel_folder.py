"""Where MLX keeps the machine code that it compiles for the CPU on Linux: in a folder of this user's own.

Whenever MLX needs a kernel, it loads ``<temporary folder>/mlx/<version>/cpu/lib<kernel>.so``, whoever put it there, and
compiles it only if there is none. The temporary folder is C++'s: what the first of TMPDIR, TMP, TEMP and TEMPDIR names
that is set, looked up each time, or else /tmp. Nothing but C++ programs heeds TEMPDIR (neither Python, nor compilers,
nor mktemp), so that is the variable to set. Where the user has set one of them, it stays, and MLX's folder in there is
made private instead. If what is called ``mlx`` in there has other things in it, it is not touched: then that variable
names a private folder below the user's from now on.
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
# MLX writes paths between double quotes into a shell's command.
_NOT_QUOTED = frozenset('"$`\\\n')
_MIN_FREE_BYTES = 16 << 20
# What MLX writes below its folder: <version>/cpu/lib<kernel>.so, and beside it the <kernel>.cpp that it was made of.
_VERSION = re.compile(r"\d[\w.+-]*", re.ASCII)
_LIBRARY = re.compile(r"lib\w+\.so", re.ASCII)
_SOURCE = re.compile(r"\w+\.cpp", re.ASCII)
# A library that is cut short and older than this belongs to nobody that still writes it.
_WRITING_SECONDS = 60.0


@functools.cache
def use_private_kernel_folder() -> Path:
    """Make MLX keep its kernels where no other user can put any, and return that folder.

    The first call decides for the process. It is in time before MLX first compiles; kernels that the user's program
    had MLX compile before are loaded already, and stay.

    Raises:
        NotPrivateError: there is no such folder; the message says why, and what to do.
    """
    given = next((name for name in _VARIABLES if os.environ.get(name) is not None), None)
    if given is not None:
        return _in_users_folder(given, Path(os.environ[given]))
    problems: list[OSError] = []
    # Machines with other code may share the cache. The other folder is this machine's, and may be tidied away.
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
            raise NotPrivateError(f"{str(folder)!r} is no folder")
        other = _other_thing(folder / "mlx")
        if other is None:
            return _fit_for_code(private_folder(folder / "mlx"))
        own = _fit_for_code(private_folder(folder / _name_of_ours()))
    except OSError as error:
        raise NotPrivateError(f"{error} ({variable} names another folder)") from error
    logger.warning("MLX's compiled kernels go to %s, which %s names from now on: %s is not MLX's", own, variable, other)
    tempfile.gettempdir()  # found out once: temporary files of this process stay where they are
    os.environ[variable] = str(own)
    return own / "mlx"


def _other_thing(folder: Path) -> Path | None:
    """Something in a folder of this user's that MLX has not written there; None if there is none, or no such folder."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return None  # which is refused anyway
    return next((path for path, status in _contents(folder) if not _is_of_mlx(path.relative_to(folder), status)), None)


def _is_of_mlx(path: Path, status: os.stat_result) -> bool:
    """Whether something has the form of what MLX writes, by its path within MLX's folder."""
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
    """The folder, if MLX can write libraries in it and load them, and those that are there are ours.

    Raises:
        NotPrivateError: others may have written some of them.
        OSError: MLX cannot work with it.
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
    """All that is in a folder and the ones below it, but for what others remove meanwhile."""
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
    """Whether MLX has compiled it, by its path, which is absolute."""
    if len(path.parts) < 5 or path.parts[-4] != "mlx" or not _LIBRARY.fullmatch(path.name):
        return False
    return _is_of_mlx(Path(*path.parts[-3:]), status)


def _remove_if_cut_short(path: Path, size: int) -> None:
    """Remove a library whose compiler was killed while it wrote: MLX would fail to load it for ever."""
    with path.open("rb") as file:
        header = file.read(64)
    # The table of sections is what compilers write last: e_shoff, e_shentsize and e_shnum of a 64-bit ELF header.
    end = int.from_bytes(header[40:48], "little")
    end += int.from_bytes(header[58:60], "little") * int.from_bytes(header[60:62], "little")
    if len(header) < 64 or not header.startswith(b"\x7fELF") or end > size:
        path.unlink(missing_ok=True)


def _keep(folder: Path) -> None:
    """Keep tidying of temporary folders from it while this process lives: it passes over folders that are locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # a network's file system, which is nobody's to tidy
        os.close(descriptor)
