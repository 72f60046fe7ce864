"""Stores KV blocks in a directory: on an SSD, or on a volume that several machines share.

A block is written to a temporary file and renamed into place. A reader therefore sees a whole block or no block. A
writer that dies leaves at most a temporary file, which is removed later. If two writers store the same block, either
may win. No fsync: a block that a power failure truncates fails its checksum. ``store_folder.py`` defines the paths of
the files, and which files in the directory belong to the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from metal_engine.kv_transfer.stores.base import StoreError
from metal_engine.kv_transfer.stores.store_folder import MARKER, StoreFolder, block_names, temporary_name, write_private
from metal_engine.settings.args import GIB

logger = logging.getLogger(__name__)

DEFAULT_MAX_SIZE = 20 * GIB
# Temporary files older than this are not being written any more.
_TEMPORARY_SECONDS = 600.0
# Eviction shrinks the store to this fraction of max_size, so that the next block does not trigger eviction again.
_EVICT_TO = 0.9
# The directory is measured again when this fraction of max_size has been written since the last measurement. Each
# process counts only its own writes, so n processes may exceed max_size by n times this fraction.
_MEASURE_EVERY = 0.05
# Errors of file systems without locks, such as some network shares. Several processes may then evict at the same time.
_NO_LOCKS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class DiskStore:
    """Implements :class:`metal_engine.kv_transfer.stores.base.KVStore` with a directory.

    Args:
        path: path of the directory, which is created if it does not exist. Several fingerprints and processes may share
            it.
        fingerprint: fingerprint of the blocks to store and find: 32 hex digits.
        max_size: size limit in bytes for the blocks of all fingerprints. Beyond it, the least recently used blocks are
            removed.
        writable: True if blocks will be stored. A directory without write access is then refused.

    Raises:
        NotAStoreError: the path is invalid, or (if ``writable``) the directory cannot be used as a store.
        StoreError: the directory cannot be created, read or (if ``writable``) written.
    """

    def __init__(
        self, path: str | Path, fingerprint: str, *, max_size: int = DEFAULT_MAX_SIZE, writable: bool = True
    ) -> None:
        self._fingerprint = fingerprint
        self._folder = StoreFolder(path)
        self.root = self._folder.root
        self.max_size = max_size
        self._unmeasured = 0
        try:
            if writable:
                self._folder.prepare()
                self._measure_and_evict()
            elif self.root.exists():
                os.scandir(self.root).close()
        except OSError as error:
            raise StoreError(f"cannot use {self.root} for KV: {error}") from error

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        return [os.path.exists(self.place(block_hash)) for block_hash in hashes]

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        found = []
        for block_hash in hashes:
            try:
                found.append(self._read(block_hash))
            except FileNotFoundError:
                break
            except OSError as error:
                raise StoreError(f"cannot read {self.place(block_hash)}: {error}") from error
        return found

    def _read(self, block_hash: bytes) -> bytes:
        """Read a block and mark it as used. Raises OSError."""
        *names, name = block_names(self._fingerprint, block_hash)
        with self._folder.opened(*names) as folder:
            # O_NONBLOCK: opening a pipe or a device instead of a file must not block.
            place = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(place, "rb") as file:
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise OSError("it is not a regular file")
            content = file.read()
            try:
                os.utime(place)  # marks the block as used now, which delays its eviction
            except OSError as error:  # the directory is not writable
                logger.debug("cannot mark %s as used: %s", name, error)
        return content

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        for block_hash, stored in blocks:
            self._put(block_hash, stored)
            self._unmeasured += len(stored)
        if self._unmeasured > self.max_size * _MEASURE_EVERY:
            self._measure_and_evict()

    def _put(self, block_hash: bytes, stored: bytes) -> None:
        *names, name = block_names(self._fingerprint, block_hash)
        temporary = temporary_name()
        try:
            with self._folder.opened(*names, make=True) as folder:
                try:
                    with write_private(temporary, folder) as file:
                        file.write(stored)
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    with contextlib.suppress(OSError):  # the file may not exist; a remaining one is removed later
                        os.unlink(temporary, dir_fd=folder)
                    raise
        except OSError as error:
            raise StoreError(f"cannot write {self.place(block_hash)}: {error}") from error

    def discard(self, block_hash: bytes) -> None:
        if not self._folder.is_marked:
            raise StoreError(f"{self.root} is not a KV store of this version: nothing is removed from it")
        try:
            self._folder.remove(block_names(self._fingerprint, block_hash))
        except OSError as error:
            raise StoreError(f"cannot remove {self.place(block_hash)}: {error}") from error

    def close(self) -> None:
        """Do nothing: the store holds no file open."""

    def place(self, block_hash: bytes) -> Path:
        """Return the path of a block's file."""
        return self.root.joinpath(*block_names(self._fingerprint, block_hash))

    # --- size -----------------------------------------------------------------------------------------------

    def _measure_and_evict(self) -> None:
        """Measure the directory. If it exceeds ``max_size``, remove the least recently used blocks.

        Does nothing while another process measures. Also removes old temporary files. Raises StoreError if the store
        cannot be measured, or stays larger than ``max_size``.
        """
        self._unmeasured = 0
        try:
            with self._folder.opened() as folder:
                lock = os.open(MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            try:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                self._evict()
            finally:
                os.close(lock)
        except BlockingIOError:
            return  # another process is evicting
        except FileNotFoundError:
            return  # the directory was removed, or is no longer a store: none of its files may be removed
        except OSError as error:
            raise StoreError(f"cannot measure {self.root}: {error}") from error

    def _evict(self) -> None:
        blocks, total = [], 0
        sweep_before = time.time() - _TEMPORARY_SECONDS
        for file in self._folder.files():
            if not file.is_temporary:
                blocks.append((file.mtime_ns, file.size, file.names))
                total += file.size
            elif file.mtime_ns < sweep_before * 1e9:
                with contextlib.suppress(OSError):
                    self._folder.remove(file.names)
        if total <= self.max_size:
            return
        before, failure = total, None
        for _, size, names in sorted(blocks):
            if total <= self.max_size * _EVICT_TO:
                break
            try:
                self._folder.remove(names)
                total -= size
            except OSError as error:  # other blocks can be evicted instead
                failure = error
        if failure is not None and total > self.max_size:
            raise failure
        logger.info("KV store %s: evicted %d of %d MB", self.root, (before - total) >> 20, before >> 20)
