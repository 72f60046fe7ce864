"""Stores KV blocks in a Valkey (or Redis) server, for machines without a common volume.

A block is one value under ``metal-engine:kv:<fingerprint>:<hash>``. Each read renews its time to live. The server's own
settings limit the total size: ``maxmemory``, with an eviction policy such as ``allkeys-lru``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from metal_engine.kv_transfer.stores.base import StoreError

DEFAULT_TTL = 24 * 3600
DEFAULT_MAX_BLOCK_BYTES = 64 << 20
DEFAULT_SOCKET_TIMEOUT = 5.0


class ValkeyStore:
    """Implements :class:`metal_engine.kv_transfer.stores.base.KVStore` with a Valkey server.

    The client has a pool of connections and replaces lost connections.

    Args:
        url: URL such as ``redis://host:6379/0``, ``rediss://`` for TLS or ``unix://path``. It may contain a user and a
            password.
        fingerprint: fingerprint of the blocks to store and find.
        ttl: time to live of a block after its last use, in seconds.
        max_block_bytes: size limit of a block. Larger blocks are refused.
        socket_timeout: time limit in seconds for connecting and for each response.

    Raises:
        StoreError: the client library is missing, the URL is invalid, or the server does not respond.
    """

    def __init__(
        self,
        url: str,
        fingerprint: str,
        *,
        ttl: int = DEFAULT_TTL,
        max_block_bytes: int = DEFAULT_MAX_BLOCK_BYTES,
        socket_timeout: float = DEFAULT_SOCKET_TIMEOUT,
    ) -> None:
        try:
            import valkey
        except ImportError as error:
            raise StoreError(
                "the valkey connector needs the client library: pip install 'metal-engine[valkey]'"
            ) from error
        self._errors = (valkey.ValkeyError, OSError)
        self._prefix = f"metal-engine:kv:{fingerprint}:".encode()
        self.ttl = ttl
        self.max_block_bytes = max_block_bytes
        try:
            self._client: Any = valkey.Valkey.from_url(
                url, socket_timeout=socket_timeout, socket_connect_timeout=socket_timeout
            )
            with self._refusing("the server does not respond"):
                self._client.ping()
        except (ValueError, TypeError) as error:  # TypeError: the URL has an unknown option
            raise StoreError(f"the url of the KV store is not valid: {error}") from error

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        with self._refusing("cannot look for blocks"), self._client.pipeline(transaction=False) as pipeline:
            for block_hash in hashes:
                pipeline.exists(self._key(block_hash))
            return [bool(answer) for answer in pipeline.execute()]

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        with self._refusing("cannot read blocks"), self._client.pipeline(transaction=False) as pipeline:
            for block_hash in hashes:
                pipeline.getex(self._key(block_hash), ex=self.ttl)
            return list(itertools.takewhile(lambda answer: answer is not None, pipeline.execute()))

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        too_large = [len(stored) for _, stored in blocks if len(stored) > self.max_block_bytes]
        if too_large:
            raise StoreError(f"a block has {too_large[0]} bytes, more than max_block_bytes")
        with self._refusing("cannot write blocks"), self._client.pipeline(transaction=False) as pipeline:
            for block_hash, stored in blocks:
                pipeline.set(self._key(block_hash), stored, ex=self.ttl)
            pipeline.execute()

    def discard(self, block_hash: bytes) -> None:
        with self._refusing("cannot remove a block"):
            self._client.delete(self._key(block_hash))

    def close(self) -> None:
        self._client.close()

    def _key(self, block_hash: bytes) -> bytes:
        return self._prefix + block_hash.hex().encode()

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Convert errors of the client library to StoreError."""
        try:
            yield
        except self._errors as error:
            # The URL is never in the message, because it may contain a password.
            raise StoreError(f"valkey: {what}: {type(error).__name__}: {error}") from error
