"""KV blocks in a Valkey (or Redis) server, for machines without a common volume.

A block is one value under ``metal-engine:kv:<fingerprint>:<hash>``, with a time to live that begins anew when it is
read. How much the server keeps is its own setting (``maxmemory``, with an eviction policy such as ``allkeys-lru``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from metal_engine.kv_transfer.stores.base import StoreError

logger = logging.getLogger(__name__)

DEFAULT_TTL = 24 * 3600
DEFAULT_MAX_BLOCK_BYTES = 64 << 20
DEFAULT_SOCKET_TIMEOUT = 5.0


class ValkeyStore:
    """Implements :class:`metal_engine.kv_transfer.stores.base.KVStore` over a server.

    The client keeps a pool of connections and connects anew where one was lost.

    Args:
        url: as in ``redis://host:6379/0``, ``rediss://`` for TLS or ``unix://path``; may carry a user and password.
        fingerprint: of the blocks that are stored and found.
        ttl: seconds that a block is kept after it was last used.
        max_block_bytes: blocks larger than this are refused.
        socket_timeout: seconds that connecting, or an answer, may take.

    Raises:
        StoreError: the client library is missing, the URL is none, or the server does not answer.
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
            self._client.ping()
        except ValueError as error:
            raise StoreError(f"the url of the KV store is not one: {error}") from error
        except self._errors as error:
            raise self._error("the server does not answer", error) from error

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for block_hash in hashes:
                    pipeline.exists(self._key(block_hash))
                return [bool(answer) for answer in pipeline.execute()]
        except self._errors as error:
            raise self._error("cannot look for blocks", error) from error

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for block_hash in hashes:
                    pipeline.getex(self._key(block_hash), ex=self.ttl)
                found: list[bytes] = []
                for answer in pipeline.execute():
                    if answer is None:
                        break
                    found.append(answer)
                return found
        except self._errors as error:
            raise self._error("cannot read blocks", error) from error

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        too_large = [len(stored) for _, stored in blocks if len(stored) > self.max_block_bytes]
        if too_large:
            raise StoreError(f"a block has {too_large[0]} bytes, more than max_block_bytes")
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for block_hash, stored in blocks:
                    pipeline.set(self._key(block_hash), stored, ex=self.ttl)
                pipeline.execute()
        except self._errors as error:
            raise self._error("cannot write blocks", error) from error

    def discard(self, block_hash: bytes) -> None:
        try:
            self._client.delete(self._key(block_hash))
        except self._errors as error:
            raise self._error("cannot remove a block", error) from error

    def close(self) -> None:
        self._client.close()

    def _key(self, block_hash: bytes) -> bytes:
        return self._prefix + block_hash.hex().encode()

    def _error(self, what: str, error: Exception) -> StoreError:
        # Never the URL: it may have a password in it.
        return StoreError(f"valkey: {what}: {type(error).__name__}: {error}")
