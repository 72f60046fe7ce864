"""Interface of a KV store, which maps block hashes to bytes. It does not depend on the meaning of the bytes.

A failure starts a pause in which the store is not used. A dead store therefore costs one deadline, not one per request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class StoreError(Exception):
    """The store cannot be used now, or refused a block. The message gives the reason."""


class KVStore(Protocol):
    """Blocks by hash, for one fingerprint. Methods may block, and are called from several threads.

    A store may lose any block at any time, and other processes may write the same blocks.
    """

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return a list with True for each block that the store contains. Raises StoreError."""

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the contents of the blocks in order, up to the first missing block. Raises StoreError."""

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Store (hash, bytes) pairs. Readers never see a partial block. Raises StoreError if a block is not stored."""

    def discard(self, block_hash: bytes) -> None:
        """Remove a block, if the store contains it. Raises StoreError."""

    def close(self) -> None:
        """Close connections and release other resources."""


class StorePause:
    """Pause in the use of a store after a failure.

    The first pause lasts 1 s. Each failure doubles the next pause, up to 30 s, until the store works again. Failures
    during a pause do not count. Several threads may use the object without a lock: a race changes only the length of a
    pause.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0
        self._next_pause = _FIRST_PAUSE_SECONDS

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    def succeeded(self) -> None:
        self._next_pause = _FIRST_PAUSE_SECONDS

    def failed(self) -> None:
        if not self.is_over:
            return
        self._until = self._clock() + self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE_SECONDS)
