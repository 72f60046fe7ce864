"""Tests the valkey connector with a real server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import valkey

from metal_engine.errors import ConfigError
from metal_engine.kv_transfer.settings import KVTransferConfig, kv_transfer_config
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import StoreError
from metal_engine.kv_transfer.stores.choice import open_store
from metal_engine.kv_transfer.stores.valkey import ValkeyStore
from metal_engine.kv_transfer.transfer import KVTransfer
from metal_engine.settings.args import EngineArgs
from tests.support.kv_blocks import (
    DEADLINE,
    FINGERPRINT,
    LAYOUT,
    Clock,
    block,
    check_get_ends_at_the_first_missing_block,
    hashes,
    load,
    stored,
)
from tests.support.serving import wait_until
from tests.support.valkey_server import ValkeyServer


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: ValkeyServer) -> ValkeyServer:
    if shared_server.process.poll() is not None:
        shared_server.start()
    valkey.Valkey.from_url(shared_server.url).flushall()
    return shared_server


def test_get_ends_at_the_first_missing_block(server: ValkeyServer) -> None:
    check_get_ends_at_the_first_missing_block(lambda fingerprint: ValkeyStore(server.url, fingerprint))


def test_use_renews_the_time_to_live(server: ValkeyServer) -> None:
    store = ValkeyStore(server.url, FINGERPRINT, ttl=1000)
    store.put(stored(1, 2))
    client = valkey.Valkey.from_url(server.url)
    keys = client.keys()
    assert len(keys) == 2 and all(900 < client.ttl(key) <= 1000 for key in keys)
    for key in keys:
        client.expire(key, 10)
    store.get(hashes(1))
    assert sorted(client.ttl(key) > 900 for key in keys) == [False, True]


def test_a_full_server_raises_an_error_and_keeps_stored_blocks() -> None:
    server = ValkeyServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        store = ValkeyStore(server.url, FINGERPRINT)
        num_put = 0
        with pytest.raises(StoreError, match=r"OOM|OutOfMemory|memory"):
            for num_put in range(5000):
                store.put(stored(num_put))
        assert num_put > 10
        LAYOUT.decode(hashes(0)[0], store.get(hashes(0))[0])
    finally:
        server.kill()


def test_a_block_that_is_too_large_is_refused(server: ValkeyServer) -> None:
    store = ValkeyStore(server.url, FINGERPRINT, max_block_bytes=100)
    with pytest.raises(StoreError, match="max_block_bytes"):
        store.put(stored(1))
    config = KVTransferConfig(kv_connector="valkey", options={"url": server.url, "max_block_bytes": LAYOUT.nbytes})
    with pytest.raises(ConfigError, match="max_block_bytes"):
        open_store(config, LAYOUT)


def test_killed_and_back_again(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is killed during loads and saves, which end with errors. After a restart, the store works again."""
    monkeypatch.setattr("metal_engine.kv_transfer.transfer._BYTES_PER_CALL", 4 * LAYOUT.nbytes)
    clock = Clock()
    config = KVTransferConfig(kv_connector="valkey", save_on_close=0.01)
    store = ValkeyStore(server.url, FINGERPRINT, socket_timeout=2.0)
    transfer = KVTransfer(store, LAYOUT, config, KVTransferStats(), clock)
    store.put(stored(*range(200)))
    killer = threading.Timer(0.01, server.kill)
    killer.start()
    tickets = []
    for i in range(2000):
        if killer.finished.is_set() and tickets and tickets[-1].error:
            break
        tickets.append(transfer.start_load(f"r{i}", hashes(*range(200)), follow=False))
        transfer.save(hashes(1000 + i), block(1000 + i)[1][np.newaxis])
        wait_until(lambda: tickets[-1].is_done, "the load to end")
    assert tickets[-1].error is not None
    for ticket in tickets:
        for block_hash, data in ticket.blocks.items():
            assert (data == block(int.from_bytes(block_hash, "big"))[1]).all()
        transfer.end_load(ticket)
        transfer.release(ticket)
    assert transfer.flush(DEADLINE) and transfer.num_reserved_bytes == 0
    server.start()
    clock.now += 60
    transfer.save(hashes(1), block(1)[1][np.newaxis])
    assert transfer.flush(DEADLINE)
    ticket = load(transfer, 1)
    assert len(ticket.blocks) == 1 and ticket.error is None
    transfer.close()


def test_the_error_for_an_unreachable_server_omits_the_password() -> None:
    server = ValkeyServer()
    server.kill()
    url = f"redis://user:secret@127.0.0.1:{server.port}/0"
    text = json.dumps({"kv_connector": "valkey", "kv_role": "kv_both", "kv_connector_extra_config": {"url": url}})
    config = kv_transfer_config(EngineArgs(model="m", kv_transfer_config=text))
    with pytest.raises(ConfigError, match="does not respond") as error:
        open_store(config, LAYOUT)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["localhost:6379", "redis://localhost:1/0?foo=1", "redis://localhost:1/0?db=one"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="url"):
        ValkeyStore(url, FINGERPRINT)


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(StoreError, match=r"pip install 'metal-engine\[valkey\]'"):
        ValkeyStore("redis://localhost", FINGERPRINT)
