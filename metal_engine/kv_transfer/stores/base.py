"""What a store is: bytes under block hashes, some at a time. It knows nothing of what the bytes mean.

A store that failed is let rest: a dead store costs a deadline once, not with every request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

_FIRST_REST_SECONDS = 1.0
_LONGEST_REST_SECONDS = 30.0


class StoreError(Exception):
    """The store cannot be used right now, or refused a block. The message says why."""


class KVStore(Protocol):
    """Blocks under their hashes, for one fingerprint. Methods may block, and are called from several threads.

    A store may lose any block at any time, and other processes may write the same ones.
    """

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        """Say of each block whether it is there. Raises StoreError."""

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Read the blocks, in order, up to the first that is not there. Raises StoreError."""

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Store (hash, bytes) pairs; a reader never sees part of one. Raises StoreError if some are not stored."""

    def discard(self, block_hash: bytes) -> None:
        """Remove a block, if it is there. Raises StoreError."""

    def close(self) -> None:
        """Let go of connections and the like."""


class StoreRest:
    """Says when a store that failed may be asked again.

    Doubles the pause with every failure, until the store works again. Thread-safe: a race costs one more attempt.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0
        self._next_rest = _FIRST_REST_SECONDS

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    def succeeded(self) -> None:
        self._next_rest = _FIRST_REST_SECONDS

    def failed(self) -> None:
        self._until = self._clock() + self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST_SECONDS)
