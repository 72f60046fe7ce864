"""KV blocks in a directory: on an SSD, or on a volume that several machines share.

    DIR/<fingerprint>/<first two digits of the hash>/<hash>.safetensors

A block is written beside its place under a name of its own and renamed into it: a reader sees a whole block or
none, and a writer that dies leaves at most a temporary file, which is swept up later. Of two writers of the same
block either may win. Nothing is forced to the medium: what a power failure cuts short fails its checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from metal_engine.kv_transfer.stores.base import StoreError
from metal_engine.settings.args import GIB

logger = logging.getLogger(__name__)

DEFAULT_MAX_SIZE = 20 * GIB
_SUFFIX = ".safetensors"
_TEMPORARY = ".tmp-"
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
        fingerprint: of the blocks that are stored and found, as a file name.
        max_size: bytes of blocks of all fingerprints; beyond it those not used for longest go first.
        writable: whether blocks will be put, so that a directory that cannot be written is refused.

    Raises:
        StoreError: the directory cannot be made, read or (for ``writable``) written.
    """

    def __init__(
        self, path: str | Path, fingerprint: str, *, max_size: int = DEFAULT_MAX_SIZE, writable: bool = True
    ) -> None:
        self.root = Path(path).expanduser()
        self.folder = self.root / fingerprint
        self.max_size = max_size
        self._unmeasured = 0
        try:
            if writable:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe = self._temporary(self.folder)
                probe.write_bytes(b"")
                probe.unlink()
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
            place = self.place(block_hash)
            try:
                found.append(place.read_bytes())
            except FileNotFoundError:
                break
            except OSError as error:
                raise StoreError(f"cannot read {place}: {error}") from error
            try:
                os.utime(place)  # used now: it is evicted later
            except OSError as error:  # evicted a moment ago, or a directory that is not ours to write
                logger.debug("cannot mark %s as used: %s", place, error)
        return found

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        for block_hash, stored in blocks:
            self._put(self.place(block_hash), stored)
            self._unmeasured += len(stored)
        if self._unmeasured > self.max_size * _MEASURE_EVERY:
            self._measure_and_evict()

    def _put(self, place: Path, stored: bytes) -> None:
        temporary = self._temporary(place.parent)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(stored)
            os.replace(temporary, place)
        except OSError as error:
            with contextlib.suppress(OSError):  # it may never have been made; what is left is swept up
                temporary.unlink()
            raise StoreError(f"cannot write {place}: {error}") from error

    def discard(self, block_hash: bytes) -> None:
        try:
            self.place(block_hash).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot remove {self.place(block_hash)}: {error}") from error

    def close(self) -> None:
        """Nothing is held open."""

    def place(self, block_hash: bytes) -> Path:
        """The file of a block."""
        name = block_hash.hex()
        return self.folder / name[:2] / (name + _SUFFIX)

    def _temporary(self, folder: Path) -> Path:
        return folder / f"{_TEMPORARY}{uuid.uuid4().hex}"

    # --- size -----------------------------------------------------------------------------------------------

    def _measure_and_evict(self) -> None:
        """Measure the directory and, beyond the cap, remove blocks, those used longest ago first."""
        self._unmeasured = 0
        try:
            with open(self.root / ".evicting", "ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return  # another process is at it
                self._evict()
        except FileNotFoundError:
            return  # the whole directory has been removed: nothing is too much
        except OSError as error:
            raise StoreError(f"cannot measure {self.root}: {error}") from error

    def _evict(self) -> None:
        blocks, total = [], 0
        sweep_before = time.time() - _TEMPORARY_SECONDS
        for entry in _files(self.root):
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            if entry.name.startswith(_TEMPORARY):
                if status.st_mtime < sweep_before:
                    Path(entry.path).unlink(missing_ok=True)  # another process may be faster
            elif entry.name.endswith(_SUFFIX):
                blocks.append((status.st_mtime_ns, status.st_size, entry.path))
                total += status.st_size
        if total <= self.max_size:
            return
        before = total
        for _, size, path in sorted(blocks):
            if total <= self.max_size * _EVICT_TO:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        logger.info("KV store %s: evicted %d of %d MB", self.root, (before - total) >> 20, before >> 20)


def _files(folder: Path | str, depth: int = 3) -> Iterator[os.DirEntry[str]]:
    """The files in a folder and its subfolders; folders that vanish meanwhile are passed over."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if depth > 1:
                yield from _files(entry.path, depth - 1)
        else:
            yield entry
