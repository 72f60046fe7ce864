"""Opens the store that the configuration names."""

from __future__ import annotations

from metal_engine.errors import ConfigError
from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stores.base import KVStore, StoreError
from metal_engine.kv_transfer.stores.disk import DiskStore
from metal_engine.kv_transfer.stores.store_folder import NotAStoreError, StoreFolder
from metal_engine.kv_transfer.stores.valkey import ValkeyStore


def check_place(config: KVTransferConfig) -> None:
    """Check that a directory can be used as a store, before a model is loaded.

    Does nothing for stores of other kinds, and for an engine that only loads from the store.

    Raises:
        ConfigError: the path is not a directory, or the directory cannot be read or contains other files.
    """
    if config.kv_connector != "disk" or not config.saves:
        return
    try:
        StoreFolder(config.options["path"]).check()
    except (NotAStoreError, OSError) as error:
        raise ConfigError(config.flag, f"{config.flag}: {error}") from error


def open_store(config: KVTransferConfig, layout: BlockLayout) -> KVStore:
    """Open the store for blocks of this layout.

    Raises:
        ConfigError: the store cannot be used as configured.
    """
    store: DiskStore | ValkeyStore
    try:
        if config.kv_connector == "valkey":
            store = ValkeyStore(fingerprint=layout.fingerprint, **config.options)
            limit, key = store.max_block_bytes, "max_block_bytes"
        else:
            store = DiskStore(fingerprint=layout.fingerprint, writable=config.saves, **config.options)
            limit, key = store.max_size, "max_size"
    except NotAStoreError as error:
        raise ConfigError(config.flag, f"{config.flag}: {error}") from error
    except StoreError as error:
        raise ConfigError(None, f"KV transfer: {error}") from error
    if config.saves and config.max_save_bytes < limit:
        limit, key = config.max_save_bytes, "max_save_bytes"
    if limit < layout.max_stored_bytes:
        raise ConfigError(
            None,
            f"KV transfer: a block has up to {layout.max_stored_bytes} bytes, more than the {key} of {limit}: raise it",
        )
    return store
