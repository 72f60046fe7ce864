"""The directory of a KV store: marked as a store, closed to other users, accessed without following links.

    DIR/metal-engine-kv-store                                     the marker: one line with the store's version
    DIR/<fingerprint>/<first two digits of the hash>/<hash>.safetensors
    .tmp-<32 hex digits>, in DIR and in each folder below it      temporary files of writes in progress

The store never reads, overwrites or removes files with other names or in other places.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from metal_engine.kv_transfer.stores.base import StoreError

logger = logging.getLogger(__name__)

MARKER = "metal-engine-kv-store"
_MARKER_TEXT = b"metal-engine KV store, version 1\n"
# Names that may exist in a store without a marker: the lock of an earlier version, and entries made by the system. The
# root of a volume on macOS has several.
_HARMLESS = frozenset(
    {
        ".evicting",
        "lost+found",
        ".snapshot",
        ".DS_Store",
        ".Spotlight-V100",
        ".fseventsd",
        ".Trashes",
        ".TemporaryItems",
        ".DocumentRevisions-V100",
    }
)
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_DIGITS = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.safetensors")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class NotAStoreError(StoreError):
    """The path is not a directory, or is a directory with other files, of another user, or of another version."""


@dataclass(frozen=True)
class StoredFile:
    """A block, or the temporary file of a write that is in progress or was interrupted.

    Attributes:
        names: names of the folders below the store, then the name of the file.
        is_temporary: True for a temporary file.
        size: size in bytes.
        mtime_ns: time of the last modification or use, in nanoseconds.
    """

    names: tuple[str, ...]
    is_temporary: bool
    size: int
    mtime_ns: int


def block_names(fingerprint: str, block_hash: bytes) -> tuple[str, str, str]:
    """Return the names of a block's folders and file. A fingerprint has 32 hex digits, a hash 32 bytes."""
    digits = block_hash.hex()
    assert _FINGERPRINT.fullmatch(fingerprint) and len(digits) == 64, (fingerprint, digits)
    return fingerprint, digits[:2], f"{digits}.safetensors"


def temporary_name() -> str:
    return f".tmp-{uuid.uuid4().hex}"


class StoreFolder:
    """The directory of a store. Folders are created with mode 0700 and files with 0600, regardless of the umask.

    Args:
        path: path of the directory. Links in this path are resolved once, here.

    Raises:
        NotAStoreError: the path names an unknown user (``~user``) or has a null character.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.root = Path(path).expanduser().resolve()
        except (RuntimeError, ValueError) as error:
            raise NotAStoreError(f"{str(path)!r} is not a path: {error}") from error

    @property
    def is_marked(self) -> bool:
        try:
            return stat.S_ISREG(os.lstat(self.root / MARKER).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def prepare(self) -> None:
        """Turn the directory into a store if necessary. Check that this process can write to the directory.

        Also closes the directory to other users.

        Raises:
            NotAStoreError: the directory has no marker and contains files that no store made, belongs to another user,
                or is a store of another version.
            OSError: the directory cannot be created or written.
        """
        if self.mark():
            return
        with self.opened() as folder:
            _make_private(self.root, folder)

    def check(self) -> None:
        """Check that the path is a store, or can become one. Changes nothing.

        Raises:
            NotAStoreError: the path is not a directory, or the directory contains files that no store made.
            OSError: the directory cannot be read.
        """
        if not self.root.exists() or self.is_marked:
            return
        if not self.root.is_dir():
            raise NotAStoreError(f"{self.root} is not a directory")
        with self.opened() as folder:
            self._refuse_others(folder)

    def _refuse_others(self, folder: int) -> None:
        if (other := _other_things(folder)) is not None:
            raise NotAStoreError(
                f"{self.root} contains {other}, which no KV store made: name a new or an empty directory"
            )

    def mark(self) -> bool:
        """Create the directory, close it to other users and add the marker. An existing marker is only checked.

        Returns:
            True if the marker was added, False if it existed.

        Raises:
            NotAStoreError: the directory has no marker and contains files that no store made, belongs to another user,
                or is a store of another version.
            OSError: the directory cannot be created or written.
        """
        for path in (*reversed(self.root.parents), self.root):
            if not path.is_dir():
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o700)
        with self.opened() as folder:
            try:
                marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            except FileNotFoundError:
                self._mark_new(folder)
                return True
            with open(marker, "rb") as file:
                if file.read(len(_MARKER_TEXT) + 1) != _MARKER_TEXT:
                    raise NotAStoreError(f"{self.root / MARKER} has another version: name another directory")
        return False

    def _mark_new(self, folder: int) -> None:
        self._refuse_others(folder)
        is_old = bool(os.listdir(folder))
        _make_private(self.root, folder)
        if is_old:
            logger.info("KV store %s: taken over from an earlier version", self.root)
        # Renamed into place, so that no other process sees a partial marker. The fsync protects against power failures.
        temporary = temporary_name()
        with write_private(temporary, folder) as file:
            file.write(_MARKER_TEXT)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, MARKER, src_dir_fd=folder, dst_dir_fd=folder)

    @contextmanager
    def opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open a folder of the store and yield its descriptor. Links below the store's path are not followed.

        Args:
            names: names of the folders on the path.
            make: True to create missing folders, and the whole store if it was removed.

        Raises:
            NotAStoreError: ``make`` is True, and :meth:`mark` refuses the directory.
            OSError: the folder cannot be opened. FileNotFoundError if it does not exist, without ``make``.
        """
        try:
            folder = self._open(names, make=False)
        except FileNotFoundError:
            if not make:
                raise
            self.mark()
            folder = self._open(names, make=True)
        try:
            yield folder
        finally:
            os.close(folder)

    def _open(self, names: tuple[str, ...], *, make: bool) -> int:
        folder = os.open(self.root, _FOLDER)
        for name in names:
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=folder)
                inner = os.open(name, _FOLDER, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        return folder

    def remove(self, names: tuple[str, ...]) -> None:
        """Remove a file of the store, if it exists. Raises OSError if it cannot be removed."""
        with contextlib.suppress(FileNotFoundError), self.opened(*names[:-1]) as folder:
            os.unlink(names[-1], dir_fd=folder)

    def files(self) -> Iterator[StoredFile]:
        """Yield the files that the store made, and close its folders to other users.

        Files that disappear during the scan are skipped.

        Raises:
            OSError: a folder cannot be read, or the directory does not exist.
        """
        with self.opened() as root:
            yield from _own_files(root, (), (_FINGERPRINT, _DIGITS))


def write_private(name: str, folder: int) -> contextlib.AbstractContextManager:
    """Open a new file in a folder for writing, with mode 0600. Raises OSError."""
    return open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder), "wb")


def _own_files(folder: int, names: tuple[str, ...], below: tuple[re.Pattern[str], ...]) -> Iterator[StoredFile]:
    """Yield the store's files in a folder, and in its subfolders whose names match the patterns in ``below``."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        name = entry.name
        try:
            if below and below[0].fullmatch(name) and entry.is_dir(follow_symlinks=False):
                inner = os.open(name, _FOLDER, dir_fd=folder)
                try:
                    _close_to_others(inner)
                    yield from _own_files(inner, (*names, name), below[1:])
                finally:
                    os.close(inner)
            elif _is_own_file(entry, names):
                status = entry.stat(follow_symlinks=False)
                is_temporary = _TEMPORARY.fullmatch(name) is not None
                yield StoredFile((*names, name), is_temporary, status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            continue


def _is_own_file(entry: os.DirEntry[str], names: tuple[str, ...]) -> bool:
    """Return True if the store creates files with this name in this place: blocks lie two folders down."""
    own = _TEMPORARY.fullmatch(entry.name) or (
        len(names) == 2 and _BLOCK.fullmatch(entry.name) and entry.name.startswith(names[1])
    )
    return bool(own) and entry.is_file(follow_symlinks=False)


def _other_things(folder: int, names: tuple[str, ...] = ()) -> str | None:
    """Return the relative path of an entry of the directory that no store has made; None if stores made all entries."""
    with os.scandir(folder) as found:
        entries = list(found)
    forms = (_FINGERPRINT, _DIGITS)[len(names) :]
    for entry in entries:
        if _is_own_file(entry, names) or (not names and entry.name in (*_HARMLESS, MARKER)):
            continue
        if not (forms and forms[0].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)):
            return "/".join((*names, entry.name))
        try:
            inner = os.open(entry.name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            continue
        try:
            other = _other_things(inner, (*names, entry.name))
        finally:
            os.close(inner)
        if other is not None:
            return other
    return None


# --- access permissions ----------------------------------------------------------------------------------------


def _make_private(root: Path, folder: int) -> None:
    """Close the directory to other users.

    The owner of a new file in the directory is compared with the owner of the directory, because a network share may
    assign files to another user than the user of the process. A directory of root, such as the mount point of a volume,
    stays unchanged, because root has access anyway. A process of root may use a directory of any user, such as a host's
    folder in a container.

    Raises:
        NotAStoreError: the directory belongs to another user.
        OSError: the directory cannot be written.
    """
    probe = temporary_name()
    try:
        with write_private(probe, folder) as file:
            us = os.fstat(file.fileno()).st_uid
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe, dir_fd=folder)
    status = os.fstat(folder)
    if status.st_uid not in (us, 0) and us != 0:
        raise NotAStoreError(f"{root} belongs to another user (uid {status.st_uid}): name a directory of your own")
    if status.st_uid == us and _close_to_others(folder):
        logger.warning(
            "KV store %s: was open to other users (mode %04o); it is 0700 now", root, status.st_mode & 0o7777
        )
    if status.st_uid not in (us, 0) or os.fstat(folder).st_mode & 0o022:
        logger.warning(
            "KV store %s: other users can write there (owner %d, mode %04o), and can so control the model's output",
            root,
            status.st_uid,
            os.fstat(folder).st_mode & 0o7777,
        )


def _close_to_others(folder: int) -> bool:
    """Remove other users' permissions from a folder. Return True if permissions were removed."""
    mode = os.fstat(folder).st_mode
    if not mode & 0o077:
        return False
    try:
        os.fchmod(folder, 0o700)
    except PermissionError:  # the folder belongs to another user, or the file system has no modes
        return False
    return not os.fstat(folder).st_mode & 0o077
