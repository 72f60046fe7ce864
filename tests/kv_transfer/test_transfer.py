"""Threads that load and save blocks: rests after failures, limits of memory, the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from metal_engine.kv_transfer import transfer as transfer_module
from metal_engine.kv_transfer.layout import BlockLayout, state_key
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import StoreError, StorePause
from metal_engine.kv_transfer.transfer import KVTransfer
from tests.support.kv_blocks import DEADLINE, LAYOUT, Clock, block, hashes, load, stored
from tests.support.serving import wait_until

MakeTransfer = Callable[..., KVTransfer]


class MemoryStore:
    """A store whose operations can be blocked and made to fail."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.num_calls = 0

    def _enter(self) -> None:
        self.num_calls += 1
        self.open.wait(DEADLINE)
        if self.error is not None:
            raise self.error

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        self._enter()
        return [h in self.blocks for h in hashes]

    def get(self, hashes: Sequence[bytes]) -> list[bytes]:
        self._enter()
        found = []
        for h in hashes:
            if h not in self.blocks:
                break
            found.append(self.blocks[h])
        return found

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        self._enter()
        self.blocks.update(blocks)

    def discard(self, block_hash: bytes) -> None:
        self.blocks.pop(block_hash, None)

    def close(self) -> None:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make_transfer(store: MemoryStore) -> Iterator[MakeTransfer]:
    """Create transfers over the store. They close at the end of the test, when the store works again."""
    transfers: list[KVTransfer] = []

    def make(
        clock: Callable[[], float] = time.monotonic, state_layout: BlockLayout | None = None, **settings: Any
    ) -> KVTransfer:
        config = KVTransferConfig(kv_connector="memory", **settings)
        transfers.append(KVTransfer(store, LAYOUT, config, KVTransferStats(), clock, state_layout))
        return transfers[-1]

    yield make
    store.error = None
    store.open.set()
    for transfer in transfers:
        transfer.close()


@pytest.fixture
def transfer(make_transfer: MakeTransfer, clock: Clock) -> KVTransfer:
    limits = {"max_load_bytes": 4 * LAYOUT.nbytes, "max_save_bytes": 4 * LAYOUT.nbytes}
    return make_transfer(clock, **limits, io_threads=2, save_on_close=0.01)


def save(transfer: KVTransfer, *seeds: int) -> None:
    transfer.save(hashes(*seeds), np.stack([block(seed)[1] for seed in seeds]))


def test_saved_blocks_are_loaded_unchanged_and_not_saved_twice(transfer: KVTransfer, store: MemoryStore) -> None:
    save(transfer, 1, 2, 3)
    assert transfer.flush(DEADLINE)
    ticket = load(transfer, 1, 2, 4, 3)
    assert list(ticket.blocks) == hashes(1, 2) and ticket.error is None
    assert all((ticket.blocks[block(seed)[0]] == block(seed)[1]).all() for seed in (1, 2))
    save(transfer, 3, 5)
    assert transfer.flush(DEADLINE)
    assert (transfer.stats.blocks_saved, transfer.stats.blocks_present) == (4, 1)


def test_a_following_load_waits_for_blocks_that_are_not_stored_yet(transfer: KVTransfer, store: MemoryStore) -> None:
    ticket = transfer.start_load("r", hashes(1, 2, 3), follow=True)
    for n in (1, 2, 3):
        wait_until(lambda n=n: store.num_calls >= 2 * n, "polls")  # type: ignore[misc]
        assert not ticket.is_done
        store.put(stored(n))
        wait_until(lambda n=n: len(ticket.blocks) == n, "the block")  # type: ignore[misc]
    wait_until(lambda: ticket.is_done, "the end")


def test_a_state_after_blocks_of_the_local_cache_is_found(make_transfer: MakeTransfer) -> None:
    """The blocks before the state are not loaded."""
    transfer = make_transfer(state_layout=LAYOUT)
    (block_hash,), state = hashes(1), block(1)[1]
    transfer.save_states([block_hash], state[None])
    assert transfer.flush(DEADLINE)
    ticket = transfer.start_load("r", hashes(2), follow=False, prefix=[block_hash])
    wait_until(lambda: ticket.is_done, "the load")
    assert not ticket.blocks and ticket.state is not None
    assert ticket.state[0] == block_hash and (ticket.state[1] == state).all()


def test_a_shortened_load_does_not_wait_for_a_state_after_its_blocks(
    make_transfer: MakeTransfer, store: MemoryStore
) -> None:
    """Memory for a state and two blocks of four. The producer saves states after the first block and the last block."""
    transfer = make_transfer(state_layout=LAYOUT, max_load_bytes=3 * LAYOUT.nbytes)
    store.put(stored(1, 2, 3, 4))
    transfer.save_states(hashes(1, 4), np.stack([block(1)[1], block(4)[1]]))
    assert transfer.flush(DEADLINE)
    ticket = transfer.start_load("r", hashes(1, 2, 3, 4), follow=True, min_state_blocks=4)
    wait_until(lambda: ticket.is_done, "the load")
    assert list(ticket.blocks) == hashes(1, 2)
    assert ticket.state is not None and ticket.state[0] == hashes(1)[0]


def test_a_following_load_polls_only_for_usable_states(
    make_transfer: Callable[..., KVTransfer], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load polls the store often while it waits for a state. Each poll must be cheap, even for a long prompt."""
    looks: list[Sequence[bytes]] = []
    contains = store.contains
    transfer = make_transfer(state_layout=LAYOUT)
    store.put(stored(*range(20)))
    transfer.save_states(hashes(5), block(5)[1][None])
    assert transfer.flush(DEADLINE)
    monkeypatch.setattr(store, "contains", lambda keys: looks.append(keys) or contains(keys))
    ticket = transfer.start_load(
        "r", hashes(*range(10, 20)), follow=True, prefix=hashes(*range(10)), min_state_blocks=19
    )
    wait_until(lambda: len(looks) > 2, "polls")
    assert not ticket.is_done and {len(keys) for keys in looks} == {2}
    store.put([(state_key(hashes(18)[0]), LAYOUT.encode(state_key(hashes(18)[0]), block(18)[1]))])
    wait_until(lambda: ticket.is_done, "the load")
    assert ticket.state is not None and ticket.state[0] == hashes(18)[0]


def test_a_corrupt_block_ends_the_load_and_is_removed(transfer: KVTransfer, store: MemoryStore) -> None:
    store.put(stored(1, 2, 3))
    store.blocks[block(2)[0]] = store.blocks[block(2)[0]][:-1] + b"\xff"
    ticket = load(transfer, 1, 2, 3)
    assert list(ticket.blocks) == hashes(1) and "checksum" in (ticket.error or "")
    assert hashes(2)[0] not in store.blocks and transfer.stats.blocks_corrupt == 1
    save(transfer, 2)
    assert transfer.flush(DEADLINE) and transfer.stats.blocks_saved == 1, "it is written anew"


def test_a_corrupt_block_that_cannot_be_removed_does_not_pause_the_store(
    transfer: KVTransfer, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(block_hash: bytes) -> None:
        raise StoreError("a directory that is not ours to write to")

    monkeypatch.setattr(store, "discard", refuse)
    store.put(stored(1, 2))
    store.blocks[block(1)[0]] = b"nothing"
    assert "truncated" in (load(transfer, 1).error or "")
    assert len(load(transfer, 2).blocks) == 1 and transfer.stats.store_errors == 0


def test_saving_pauses_between_calls_except_during_a_flush(
    make_transfer: MakeTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metal_engine.kv_transfer.save_queue._SAVE_CPU_FRACTION", 1e-12)  # pauses of years
    monkeypatch.setattr("metal_engine.kv_transfer.transfer._BYTES_PER_CALL", LAYOUT.nbytes)
    transfer = make_transfer(io_threads=1)
    save(transfer, 1, 2, 3)
    wait_until(lambda: transfer.stats.as_dict()["blocks_saved"] == 1, "the first call")
    assert not transfer.flush(0.0) and transfer.stats.as_dict()["blocks_saved"] == 1
    assert transfer.flush(DEADLINE) and transfer.stats.as_dict()["blocks_saved"] == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
@pytest.mark.parametrize(("niceness", "asked_for"), [(0, [10]), (19, [])])
def test_transfer_threads_run_at_low_priority_and_survive_a_refusal(
    make_transfer: MakeTransfer, monkeypatch: pytest.MonkeyPatch, niceness: int, asked_for: list[int]
) -> None:
    """In a process with a higher nice value (`nice -n 19`), lowering the value would need privileges."""
    given: list[int] = []

    def refuse(which: int, who: int, priority: int) -> None:
        given.append(priority)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "getpriority", lambda which, who: niceness)
    monkeypatch.setattr(os, "setpriority", refuse)
    transfer = make_transfer(io_threads=1)
    save(transfer, 1)
    assert transfer.flush(DEADLINE)
    assert len(load(transfer, 1).blocks) == 1 and given == asked_for * 2


def test_many_followers_do_not_look_more_often_together(
    make_transfer: MakeTransfer, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "_POLLS_PER_SECOND", 0.1)
    transfer = make_transfer(io_threads=1)
    tickets = [transfer.start_load(f"r{i}", hashes(i), follow=True) for i in range(20)]
    wait_until(lambda: all(ticket.has_answered for ticket in tickets), "the first answers")
    time.sleep(0.1)
    assert store.num_calls == 20, "the next look is seconds away"


@pytest.mark.parametrize("error", [StoreError("gone"), RuntimeError("a mistake")])
def test_a_store_that_fails_is_paused(transfer: KVTransfer, store: MemoryStore, clock: Clock, error: Exception) -> None:
    store.put(stored(1))
    store.error = error
    ticket = load(transfer, 1)
    assert str(error) in (ticket.error or "") and not ticket.blocks
    num_calls = store.num_calls
    assert transfer.start_load("r2", hashes(1), follow=False).is_done
    assert store.num_calls == num_calls, "a store that failed is not asked by the next request"
    save(transfer, 5)
    assert transfer.flush(DEADLINE) and transfer.grant_saves(3) == 0
    assert transfer.stats.blocks_failed == 1 and transfer.stats.store_errors == 2
    store.error = None
    clock.now += 5
    assert len(load(transfer, 1).blocks) == 1 and transfer.grant_saves(3) == 3


def test_a_success_resets_the_length_of_store_pauses(transfer: KVTransfer, store: MemoryStore, clock: Clock) -> None:
    """Loads and saves rest on their own."""
    store.put(stored(1))
    for _ in range(3):
        store.error = StoreError("gone")
        assert load(transfer, 1).error == "gone"
        save(transfer, 5)
        assert transfer.flush(DEADLINE)
        store.error = None
        clock.now += 1
        assert len(load(transfer, 1).blocks) == 1 and transfer.grant_saves(1) == 1
        save(transfer, 5)
        assert transfer.flush(DEADLINE)


def test_failures_during_a_pause_do_not_lengthen_the_next_pause(clock: Clock) -> None:
    """One outage, seen by several threads."""
    pause = StorePause(clock)
    for seconds in (1, 2, 4):
        for _ in range(4):
            pause.failed()
        clock.now += seconds - 0.5
        assert not pause.is_over
        clock.now += 0.5
        assert pause.is_over


def test_loads_that_wait_in_the_queue_end_when_the_store_fails(
    make_transfer: Callable[..., KVTransfer], store: MemoryStore, clock: Clock
) -> None:
    transfer = make_transfer(clock, io_threads=1)
    store.open.clear()
    tickets = [transfer.start_load(f"r{i}", hashes(i), follow=False) for i in range(5)]
    store.error = StoreError("gone")
    store.open.set()
    wait_until(lambda: all(ticket.is_done for ticket in tickets), "the loads")
    assert store.num_calls == 1 and all(ticket.error for ticket in tickets)


def test_rests_grow_for_loads_of_a_state_alone(
    make_transfer: Callable[..., KVTransfer], store: MemoryStore, clock: Clock
) -> None:
    transfer = make_transfer(clock, state_layout=LAYOUT)
    store.error = StoreError("gone")
    for seconds in (1, 2, 4):
        ticket = transfer.start_load("r", [], follow=False, prefix=hashes(1))
        wait_until(lambda ticket=ticket: ticket.is_done, "the load")  # type: ignore[misc]
        assert ticket.error == "gone"
        clock.now += seconds - 0.5
        assert transfer.start_load("r2", hashes(1), follow=False).is_done
        clock.now += 0.5


def test_a_full_queue_grants_no_saves(transfer: KVTransfer, store: MemoryStore) -> None:
    store.open.clear()
    assert transfer.grant_saves(6) == 4
    save(transfer, 1, 2, 3)
    assert transfer.grant_saves(6) == 1 and transfer.stats.blocks_dropped == 7
    store.open.set()
    assert transfer.flush(DEADLINE) and transfer.grant_saves(4) == 4


def test_loads_wait_for_host_memory_of_earlier_loads(transfer: KVTransfer, store: MemoryStore) -> None:
    """Memory for four blocks. A load requests no more, and the next load waits until the first releases its memory."""
    store.put(stored(*range(20)))
    first = load(transfer, *range(6))
    assert len(first.blocks) == 4
    second = transfer.start_load("second", hashes(10, 11), follow=False)
    third = transfer.start_load("third", hashes(12, 13), follow=False)
    transfer.end_load(transfer.start_load("aborted", hashes(14), follow=False))
    assert second.started is third.started is None and transfer.stats.loads_deferred == 3
    assert len(transfer.end_load(first)) == 4
    assert second.started is None, "what has arrived takes its memory until it is released"
    transfer.release(first)
    wait_until(lambda: second.is_done and third.is_done, "the others")
    for ticket in (second, third):
        assert len(transfer.end_load(ticket)) == 2
        transfer.release(ticket)
    assert transfer.num_reserved_bytes == 0


def test_a_miss_keeps_no_memory(transfer: KVTransfer) -> None:
    for _ in range(10):
        load(transfer, 1, 2, 3, 4)
    assert transfer.num_reserved_bytes == 0 and transfer.stats.loads_deferred == 0


def test_a_load_cancelled_in_the_middle_gives_its_memory_back(transfer: KVTransfer, store: MemoryStore) -> None:
    store.put(stored(1, 2))
    store.open.clear()
    ticket = transfer.start_load("r", hashes(1, 2), follow=False)
    wait_until(lambda: store.num_calls == 2, "the thread in the store")
    transfer.end_load(ticket)
    assert transfer.num_reserved_bytes == 0
    store.open.set()
    after = load(transfer, 1)
    assert len(transfer.end_load(after)) == 1
    transfer.release(after)
    assert transfer.num_reserved_bytes == 0


def test_closing_writes_queued_saves(make_transfer: MakeTransfer, store: MemoryStore) -> None:
    transfer = make_transfer(save_on_close=DEADLINE)
    save(transfer, *range(40))
    transfer.close()
    assert len(store.blocks) == 40


def test_closing_does_not_wait_for_a_store_that_hangs(make_transfer: MakeTransfer, store: MemoryStore) -> None:
    transfer = make_transfer(save_on_close=0.01)
    store.open.clear()
    save(transfer, 1)
    started = time.monotonic()
    transfer.close()
    assert time.monotonic() - started < DEADLINE
