"""What a store is: bytes under block hashes, some at a time. It knows nothing of what the bytes mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreError(Exception):
    """The store cannot be used right now, or refused a block. The message says why."""


class KVStore(Protocol):
    """Blocks under their hashes, for one fingerprint. Methods may block, and are called from several threads.

    A store may lose any block at any time, and other processes may write the same ones.
    """

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        """Say of each block whether it is there. Raises StoreError."""
        ...

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Read the blocks, in order, up to the first that is not there. Raises StoreError."""
        ...

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Store (hash, bytes) pairs; a reader never sees part of one. Raises StoreError if some are not stored."""
        ...

    def discard(self, block_hash: bytes) -> None:
        """Remove a block, if it is there. Raises StoreError."""
        ...

    def close(self) -> None:
        """Let go of connections and the like."""
        ...
