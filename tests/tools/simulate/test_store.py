import pytest

from metal_engine.kv_transfer.settings import KVTransferConfig
from tools.simulate.store import SharedStore, SimulatedTransfer, StoreConfig

HASHES = [bytes([i]) for i in range(8)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(**config):
    return SharedStore(StoreConfig(**({"bandwidth": 100.0, "block_bytes": 10, "latency": 0.5} | config)))


def test_a_block_is_readable_only_after_the_transfer_to_the_store():
    store = make()
    assert store.write(HASHES[:2], 0.0) == pytest.approx(0.2) and store.read(HASHES, 0.55)[0] == 0
    assert store.read(HASHES, 0.65)[0] == 1 and store.read(HASHES, 0.75)[0] == 2


def test_reads_wait_for_each_other_and_blocks_are_written_once():
    store = make()
    store.write(HASHES[:4], 0.0)
    store.write(HASHES[:4], 1.0)
    assert store.num_bytes_written == 40
    assert store.read(HASHES, 10.0) == (4, pytest.approx(10.5), pytest.approx(10.9))
    assert store.read(HASHES[:1], 10.0) == (1, pytest.approx(10.9), pytest.approx(11.0))
    assert store.num_bytes_read == 50


def test_blocks_that_would_miss_the_deadline_do_not_use_the_link():
    store = make(latency=0.0)
    store.write(HASHES, 0.0)
    assert store.read(HASHES, 10.0, deadline=10.5) == (8, 10.0, pytest.approx(10.8))
    assert store.num_bytes_read == 50
    assert store.read(HASHES[:1], 10.0, deadline=20.0) == (1, pytest.approx(10.5), pytest.approx(10.6))
    assert store.read(HASHES[:1], 10.0, deadline=10.2)[1] == pytest.approx(10.6)  # cancelled before it begins
    assert store.num_bytes_read == 60


def test_the_blocks_used_longest_ago_make_room():
    store = make(capacity=30)
    store.write(HASHES[:3], 0.0)
    assert store.read(HASHES[:1], 5.0)[0] == 1
    store.write(HASHES[3:4], 5.0)
    assert [store.read([block], 9.0)[0] for block in HASHES[:4]] == [1, 0, 1, 1]


def test_a_timed_out_load_returns_the_blocks_that_have_arrived():
    clock, store = Clock(), make(latency=0.0, bandwidth=1.0)
    transfer = SimulatedTransfer(store, KVTransferConfig(kv_connector="valkey", load_timeout=25.0), clock)
    store.write(HASHES[:4], 0.0)
    clock.now = 100.0
    ticket = transfer.start_load("a", HASHES, follow=False)
    assert transfer.next_change() == pytest.approx(125.001)
    clock.now = 125.5
    transfer.load_timed_out(ticket)
    assert list(transfer.end_load(ticket)) == HASHES[:2]
    assert transfer.next_change() is None
    assert list(transfer.end_load(transfer.start_load("b", HASHES[:1], follow=False))) == []  # the link is busy


def test_a_store_is_skipped_for_a_while_after_an_empty_timed_out_load():
    clock, store = Clock(), make(bandwidth=0.1, latency=0.0)
    transfer = SimulatedTransfer(store, KVTransferConfig(kv_connector="valkey"), clock)
    store.write(HASHES[:2], 0.0)
    clock.now = 1000.0
    store.read(HASHES[:2], clock.now)  # read by another replica, which occupies the link for 200 s
    ticket = transfer.start_load("a", HASHES, follow=False)
    clock.now = 1011.0
    transfer.load_timed_out(ticket)
    assert transfer.end_load(ticket) == {}
    before = store.num_bytes_read
    assert transfer.start_load("b", HASHES, follow=False).is_done
    assert store.num_bytes_read == before
    clock.now = 1012.5
    assert not transfer.start_load("c", HASHES, follow=False).is_done


def test_saves_are_granted_up_to_max_save_bytes():
    clock, store = Clock(), make()
    transfer = SimulatedTransfer(store, KVTransferConfig(kv_connector="valkey", max_save_bytes=45), clock)
    assert transfer.grant_saves(8) == 4
    transfer.save(HASHES[:3])
    assert transfer.grant_saves(8) == 1
    clock.now = 0.31
    assert transfer.grant_saves(8) == 4
