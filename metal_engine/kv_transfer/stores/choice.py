"""The store that a configuration asks for."""

from __future__ import annotations

from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stores.base import KVStore, StoreError
from metal_engine.kv_transfer.stores.disk import DiskStore
from metal_engine.settings import ConfigError


def open_store(config: KVTransferConfig, layout: BlockLayout) -> KVStore:
    """Open the store for blocks of this layout.

    Raises:
        ConfigError: it cannot be used as configured.
    """
    try:
        assert config.kv_connector == "disk"
        store = DiskStore(fingerprint=layout.fingerprint, writable=config.saves, **config.options)
    except StoreError as error:
        raise ConfigError(f"KV transfer: {error}") from error
    if store.max_size < layout.max_stored_bytes:
        raise ConfigError(
            f"KV transfer: a size of {store.max_size} bytes does not hold one block ({layout.max_stored_bytes})"
        )
    return store
