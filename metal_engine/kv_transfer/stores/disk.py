"""KV blocks in a directory: on an SSD, or on a volume that several machines share.

A block is written beside its place under a name of its own and renamed into it: a reader sees a whole block or
none, and a writer that dies leaves at most a temporary file, which is swept up later. Of two writers of the same
block either may win. Nothing is forced to the medium: what a power failure cuts short fails its checksum.
Where its files lie, and which of a directory's files are its own: ``store_folder.py``.
"""

from __future__ import annotations

import contextlib
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
# Older temporary files belong to nobody that still writes.
_TEMPORARY_SECONDS = 600.0
# Eviction goes down to this share of the cap, so that it is not due again with the next block.
_EVICT_TO = 0.9
# Written since the directory was last measured, as a share of the cap, before it is measured again. Each process
# counts only what it wrote itself, so n of them may exceed the cap by n times this.
_MEASURE_EVERY = 0.05


class DiskStore:
    """Implements :class:`metal_engine.kv_transfer.stores.base.KVStore` over a directory.

    Args:
        path: the directory; made if need be. Several fingerprints and processes may share it.
        fingerprint: of the blocks that are stored and found: 32 hex digits.
        max_size: bytes of blocks of all fingerprints; beyond it those not used for longest go first.
        writable: whether blocks will be put, so that a directory that cannot be written is refused.

    Raises:
        NotAStoreError: the directory has things in it that are not a store's, or is another user's (for ``writable``).
        StoreError: the directory cannot be made, read or (for ``writable``) written.
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
        """A block's bytes, which counts as a use of it. Raises OSError."""
        *names, name = block_names(self._fingerprint, block_hash)
        with self._folder.opened(*names) as folder:
            # Nothing but a file is waited for.
            place = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(place, "rb") as file:
            if not stat.S_ISREG(os.fstat(place).st_mode):
                raise OSError("it is no file")
            content = file.read()
            try:
                os.utime(place)  # used now: it is evicted later
            except OSError as error:  # a directory that is not ours to write
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
                    with contextlib.suppress(OSError):  # it may never have been made; what is left is swept up
                        os.unlink(temporary, dir_fd=folder)
                    raise
        except OSError as error:
            raise StoreError(f"cannot write {self.place(block_hash)}: {error}") from error

    def discard(self, block_hash: bytes) -> None:
        if not self._folder.is_marked:
            raise StoreError(f"{self.root} is no KV store of this version: nothing is removed from it")
        try:
            self._folder.remove(block_names(self._fingerprint, block_hash))
        except OSError as error:
            raise StoreError(f"cannot remove {self.place(block_hash)}: {error}") from error

    def close(self) -> None:
        """Nothing is held open."""

    def place(self, block_hash: bytes) -> Path:
        """The file of a block."""
        return self.root.joinpath(*block_names(self._fingerprint, block_hash))

    # --- size -----------------------------------------------------------------------------------------------

    def _measure_and_evict(self) -> None:
        """Measure the directory and, beyond the cap, remove blocks, those used longest ago first."""
        self._unmeasured = 0
        try:
            with self._folder.opened() as folder:
                lock = os.open(MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._evict()
            finally:
                os.close(lock)
        except BlockingIOError:
            return  # another process is at it
        except FileNotFoundError:
            return  # the whole directory has been removed, or is a store no more: nothing of it is ours
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
                self._folder.remove(file.names)
        if total <= self.max_size:
            return
        before = total
        for _, size, names in sorted(blocks):
            if total <= self.max_size * _EVICT_TO:
                break
            self._folder.remove(names)
            total -= size
        logger.info("KV store %s: evicted %d of %d MB", self.root, (before - total) >> 20, before >> 20)
