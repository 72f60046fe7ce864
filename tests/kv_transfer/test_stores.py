"""Block format, directory store, and transfer threads."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from metal_engine.errors import ConfigError
from metal_engine.kv_transfer import transfer as transfer_module
from metal_engine.kv_transfer.layout import BlockLayout, CorruptBlockError, KVPart, state_key
from metal_engine.kv_transfer.settings import KVTransferConfig, kv_transfer_config
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores import disk
from metal_engine.kv_transfer.stores.base import KVStore, StoreError, StorePause
from metal_engine.kv_transfer.stores.choice import open_store
from metal_engine.kv_transfer.stores.disk import DiskStore
from metal_engine.kv_transfer.stores.store_folder import MARKER
from metal_engine.kv_transfer.transfer import KVTransfer, LoadTicket
from metal_engine.settings.args import EngineArgs
from tests.support.serving import wait_until

FINGERPRINT = "0123456789abcdef" * 2
ANOTHER_MODEL = "f" * 32
DEADLINE = 60.0
MakeTransfer = Callable[..., KVTransfer]


def make_layout(fingerprint: str = FINGERPRINT) -> BlockLayout:
    parts = [
        KVPart(f"layers.{i:04d}.{name}", dtype, (4, 2, 8), 64 * size)
        for i, (dtype, size) in enumerate([("float32", 4), ("bfloat16", 2)])
        for name in ("keys", "values")
    ]
    return BlockLayout(parts, fingerprint)


LAYOUT = make_layout()


def block(seed: int) -> tuple[bytes, np.ndarray]:
    """Return a hash and the data of its block."""
    return seed.to_bytes(32, "big"), np.random.default_rng(seed).integers(0, 256, LAYOUT.nbytes, np.uint8)


def stored(*seeds: int) -> list[tuple[bytes, bytes]]:
    return [(h, LAYOUT.encode(h, data)) for h, data in map(block, seeds)]


def hashes(*seeds: int) -> list[bytes]:
    return [block(seed)[0] for seed in seeds]


# --- layout -------------------------------------------------------------------------------------------------


def test_a_stored_block_is_a_safetensors_file(tmp_path: Path) -> None:
    layout = BlockLayout([KVPart("a", "float32", (2, 1, 3), 24), KVPart("b", "float16", (2, 1, 3), 12)], "f")
    values = {"a": np.arange(6, dtype=np.float32), "b": np.arange(6, dtype=np.float16) / 3}
    data = np.empty(layout.nbytes, np.uint8)
    for name, array in values.items():
        start, stop = layout.offsets[name]
        data[start:stop] = array.view(np.uint8)
    path = tmp_path / "block.safetensors"
    path.write_bytes(layout.encode(b"h" * 32, data))
    loaded = load_file(path)
    assert loaded.keys() == values.keys()
    for name, array in values.items():
        assert (loaded[name] == array.reshape(2, 1, 3)).all()
    assert path.stat().st_size <= layout.max_stored_bytes


def test_every_flipped_bit_and_every_length_is_noticed() -> None:
    block_hash, data = block(1)
    good = LAYOUT.encode(block_hash, data)
    assert (LAYOUT.decode(block_hash, good) == data).all()
    rng = random.Random(0)
    header = range(8 + int.from_bytes(good[:8], "little"))
    for position in [*header, *rng.sample(range(len(header), len(good)), 200)]:
        bad = bytearray(good)
        bad[position] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptBlockError):
            LAYOUT.decode(block_hash, bytes(bad))
    for length in [*range(0, len(good), 7), len(good) - 1]:
        with pytest.raises(CorruptBlockError):
            LAYOUT.decode(block_hash, good[:length])
    with pytest.raises(CorruptBlockError):
        LAYOUT.decode(block_hash, good + b"\0")


def test_a_header_that_is_nested_deep_is_refused() -> None:
    header = b"[" * 100_000
    with pytest.raises(CorruptBlockError, match="not JSON"):
        LAYOUT.decode(block(1)[0], len(header).to_bytes(8, "little") + header)


def test_a_block_of_another_hash_model_or_layout_is_refused() -> None:
    block_hash, data = block(1)
    good = LAYOUT.encode(block_hash, data)
    with pytest.raises(CorruptBlockError, match="block_hash"):
        LAYOUT.decode(block(2)[0], good)
    with pytest.raises(CorruptBlockError, match="fingerprint"):
        make_layout("another").decode(block_hash, good)
    with pytest.raises(CorruptBlockError, match="tensors"):
        BlockLayout([KVPart("a", "uint8", (4, 1, LAYOUT.nbytes // 4), LAYOUT.nbytes)], FINGERPRINT).decode(
            block_hash, good
        )


# --- the directory ------------------------------------------------------------------------------------------


def check_get_ends_at_the_first_missing_block(open_store: Callable[[str], KVStore]) -> None:
    """Check a kind of store. ``open_store`` opens it for a fingerprint."""
    store = open_store(FINGERPRINT)
    store.put(stored(1, 2, 4))
    assert store.contains(hashes(1, 2, 3, 4)) == [True, True, False, True]
    assert store.get(hashes(1, 2, 3, 4)) == [data for _, data in stored(1, 2)]
    assert len(open_store(FINGERPRINT).get(hashes(4))) == 1
    assert open_store(ANOTHER_MODEL).get(hashes(4)) == []
    store.discard(hashes(1)[0])
    store.discard(hashes(1)[0])
    assert store.get(hashes(1, 2)) == []


def test_get_ends_at_the_first_missing_block(tmp_path: Path) -> None:
    check_get_ends_at_the_first_missing_block(lambda fingerprint: DiskStore(tmp_path, fingerprint))


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = len(stored(0)[0][1])
    store = DiskStore(tmp_path, FINGERPRINT, max_size=10 * size)
    other = DiskStore(tmp_path, ANOTHER_MODEL, max_size=10 * size)
    other.put(stored(100))
    for seed in range(9):
        store.put(stored(seed))
        os.utime(store.place(hashes(seed)[0]), (seed, seed))
    os.utime(other.place(hashes(100)[0]), (0, 0))
    store.get(hashes(0))  # marks the block as used
    store.put(stored(50))
    assert not any(other.contains(hashes(100))), "the cap counts all models"
    assert store.contains(hashes(0, 1, 2, 8, 50)) == [True, False, True, True, True]
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors")) <= 10 * size


def test_old_temporary_files_are_swept_up(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FINGERPRINT)
    store.put(stored(1))
    folder = store.place(hashes(1)[0]).parent
    old, new = folder / f".tmp-{0:032x}", folder / f".tmp-{1:032x}"
    for path in (old, new):
        path.write_bytes(b"half a block")
    os.utime(old, (1, 1))
    DiskStore(tmp_path, FINGERPRINT)
    assert not old.exists() and new.exists(), "the new one may be somebody's who is writing"


@pytest.mark.parametrize("reason", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_eviction_without_locks_on_a_share_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    size = len(stored(0)[0][1])
    if reason == errno.EIO:
        with pytest.raises(StoreError, match="cannot measure"):
            DiskStore(tmp_path, FINGERPRINT)
        return
    DiskStore(tmp_path, FINGERPRINT, max_size=10 * size).put(stored(*range(20)))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 9


def test_a_block_that_cannot_be_removed_does_not_stop_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(stored(0)[0][1])
    store = DiskStore(tmp_path, FINGERPRINT, max_size=10 * size)
    stuck, remove = {store.place(hashes(0)[0]).name}, store._folder.remove

    def refuse(names: tuple[str, ...]) -> None:
        if names[-1] in stuck:
            raise PermissionError(1, "Operation not permitted")
        remove(names)

    monkeypatch.setattr(store._folder, "remove", refuse)
    store.put(stored(0))
    os.utime(store.place(hashes(0)[0]), (0, 0))
    for seed in range(1, 30):
        store.put(stored(seed))
    assert store.contains(hashes(0)) == [True] and len(list(tmp_path.rglob("*.safetensors"))) <= 10
    stuck |= {store.place(block_hash).name for block_hash in hashes(*range(100))}
    with pytest.raises(StoreError, match="Operation not permitted"):
        for seed in range(30, 60):
            store.put(stored(seed))
    assert len(list(tmp_path.rglob("*.safetensors"))) <= 12


def test_a_directory_that_is_removed_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    store = DiskStore(root, FINGERPRINT, max_size=1 << 20)
    store.put(stored(1))
    subprocess.run(["rm", "-r", root], check=True)
    assert store.get(hashes(1)) == [] and store.contains(hashes(1)) == [False]
    store.put(stored(*range(300)))  # enough to trigger a measurement
    assert store.contains(hashes(299)) == [True]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot use"):
        DiskStore(tmp_path / "file" / "kv", FINGERPRINT)


def test_errors_of_the_file_system_are_store_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, FINGERPRINT)
    store.put(stored(1))

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "replace", refuse)
    with pytest.raises(StoreError, match="No space left"):
        store.put(stored(2))
    monkeypatch.undo()
    assert store.get(hashes(2)) == [] and not list(tmp_path.rglob(".tmp-*")), "nothing half-written stays"
    place = store.place(hashes(1)[0])
    place.unlink()
    place.mkdir()
    with pytest.raises(StoreError, match="cannot read"):
        store.get(hashes(1))


_WRITER = """
import sys
from tests.kv_transfer.test_stores import DiskStore, FINGERPRINT, stored
store = DiskStore(sys.argv[1], FINGERPRINT, max_size=40 * len(stored(0)[0][1]))
blocks = [stored(seed)[0] for seed in range(50)]
store.put(blocks)
print("ready", flush=True)  # the reader finds blocks, even if this process does not run for a while
while True:
    for one in blocks:
        store.put([one])
"""
_FORKER = """
import os, random, signal, sys, time
import tests.kv_transfer.test_stores as t
root, kills = sys.argv[1], int(sys.argv[2])
size = 40 * len(t.stored(0)[0][1])
blocks = [t.stored(seed)[0] for seed in range(50)]
rng = random.Random(0)
ready, begun = os.pipe()
for kill in range(kills):
    pid = os.fork()
    if pid == 0:
        store = t.DiskStore(root, t.FINGERPRINT, max_size=size)
        os.write(begun, b".")
        while True:
            for one in blocks:
                store.put([one])
    os.read(ready, 1)  # on a busy machine, it would otherwise be killed before it writes
    time.sleep(rng.uniform(0.0, 0.008))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def check_whole(root: Path) -> int:
    """Check that every published block is complete and valid. Return their number."""
    paths = list(root.rglob("*.safetensors"))
    for path in paths:
        LAYOUT.decode(bytes.fromhex(path.stem), path.read_bytes())
    return len(paths)


@pytest.mark.parametrize("num_kills", [80, pytest.param(1000, marks=pytest.mark.full)])
def test_writers_killed_at_any_point_leave_whole_blocks_only(tmp_path: Path, num_kills: int) -> None:
    """`kill -9` at random points in a shared directory, with eviction."""
    subprocess.run([sys.executable, "-c", _FORKER, tmp_path, str(num_kills)], check=True)
    assert check_whole(tmp_path) > 0
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    for path in others:
        os.utime(path, (1, 1))
    store = DiskStore(tmp_path, FINGERPRINT)
    assert [path.name for path in others if path.exists()] == [MARKER], "what they were writing is swept up"
    for seed in range(50):
        store.put(stored(seed))
    assert check_whole(tmp_path) == 50


def test_two_processes_write_the_same_blocks(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        store = DiskStore(tmp_path, FINGERPRINT, writable=False)
        rng = random.Random(0)
        num_read = 0
        for _ in range(500):
            seed = rng.randrange(50)
            for data in store.get(hashes(seed)):
                assert (LAYOUT.decode(block(seed)[0], data) == block(seed)[1]).all()
                num_read += 1
        assert num_read > 25
    finally:
        for writer in writers:
            assert writer.poll() is None, "a writer ended by itself"
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
    check_whole(tmp_path)


# --- the threads --------------------------------------------------------------------------------------------


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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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


def load(transfer: KVTransfer, *seeds: int) -> LoadTicket:
    """Load blocks, and return the ticket when the load is done."""
    ticket = transfer.start_load("r", hashes(*seeds), follow=False)
    wait_until(lambda: ticket.is_done, "the load")
    return ticket


def save(transfer: KVTransfer, *seeds: int) -> None:
    transfer.save(hashes(*seeds), np.stack([block(seed)[1] for seed in seeds]))


def test_what_is_saved_is_loaded(transfer: KVTransfer, store: MemoryStore) -> None:
    save(transfer, 1, 2, 3)
    assert transfer.flush(DEADLINE)
    ticket = load(transfer, 1, 2, 4, 3)
    assert list(ticket.blocks) == hashes(1, 2) and ticket.error is None
    assert all((ticket.blocks[block(seed)[0]] == block(seed)[1]).all() for seed in (1, 2))
    save(transfer, 3, 5)
    assert transfer.flush(DEADLINE)
    assert (transfer.stats.blocks_saved, transfer.stats.blocks_present) == (4, 1)


def test_a_follower_waits_for_blocks_that_are_not_there_yet(transfer: KVTransfer, store: MemoryStore) -> None:
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


def test_a_follower_looks_only_for_states_that_it_can_use(
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


def test_a_corrupt_block_that_cannot_be_removed_does_not_let_the_store_rest(
    transfer: KVTransfer, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(block_hash: bytes) -> None:
        raise StoreError("a directory that is not ours to write to")

    monkeypatch.setattr(store, "discard", refuse)
    store.put(stored(1, 2))
    store.blocks[block(1)[0]] = b"nothing"
    assert "truncated" in (load(transfer, 1).error or "")
    assert len(load(transfer, 2).blocks) == 1 and transfer.stats.store_errors == 0


def test_saving_pauses_between_calls_unless_somebody_waits_for_its_end(
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
def test_threads_give_way_and_live_on_where_that_is_forbidden(
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
def test_a_store_that_fails_is_let_rest(
    transfer: KVTransfer, store: MemoryStore, clock: Clock, error: Exception
) -> None:
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


def test_a_success_makes_the_next_rest_as_short_as_the_first(
    transfer: KVTransfer, store: MemoryStore, clock: Clock
) -> None:
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


def test_failures_during_a_rest_do_not_make_the_next_rest_longer(clock: Clock) -> None:
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


def test_loads_take_turns_for_host_memory(transfer: KVTransfer, store: MemoryStore) -> None:
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


def test_closing_writes_what_waits(make_transfer: MakeTransfer, store: MemoryStore) -> None:
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


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_a_block_that_never_fits_into_the_queue_is_refused_at_the_start(tmp_path: Path, role: str) -> None:
    config = KVTransferConfig(
        kv_connector="disk", kv_role=role, options={"path": str(tmp_path)}, max_save_bytes=LAYOUT.nbytes - 1
    )
    if config.saves:
        with pytest.raises(ConfigError, match="more than the max_save_bytes of"):
            open_store(config, LAYOUT)
    else:
        open_store(config, LAYOUT)


# --- settings -----------------------------------------------------------------------------------------------


def test_settings_as_given() -> None:
    assert kv_transfer_config(EngineArgs(model="m")) is None
    config = kv_transfer_config(EngineArgs(model="m", kv_cache_dir="/kv", kv_cache_dir_size=123))
    assert config is not None and config.options == {"path": "/kv", "max_size": 123}
    assert config.loads and config.saves
    config = kv_transfer_config(
        EngineArgs(
            model="m",
            kv_transfer_config='{"kv_connector": "disk", "kv_role": "kv_producer", "kv_load_failure_policy": '
            '"fail", "kv_connector_extra_config": {"path": "/kv", "max_size": "3GiB", "load_timeout": 2}}',
        )
    )
    assert config == KVTransferConfig(
        kv_connector="disk",
        kv_role="kv_producer",
        kv_load_failure_policy="fail",
        options={"path": "/kv", "max_size": 3 << 30},
        load_timeout=2.0,
    )


DISK = '{"kv_connector": "disk", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"kv_role": "kv_both"}', "kv_connector"),
        ('{"kv_connector": "tape", "kv_role": "kv_both"}', "disk, valkey"),
        ('{"kv_connector": "disk", "kv_role": "both"}', "kv_role"),
        ('{"kv_connector": "disk"}', "kv_role"),
        ('{"kv_connector": "disk", "kv_role": "kv_both", "kv_load_failure_policy": "cry"}', "recompute, fail"),
        ('{"kv_connector": "disk", "kv_role": "kv_both", "kv_port": 1}', "unknown key 'kv_port'"),
        (DISK, "needs 'path'"),
        ('{"kv_connector": "disk", "kv_role": "kv_both", "kv_connector_extra_config": {"url": "x"}}', "'url'"),
        *(
            (f'{DISK[:-1]}, "kv_connector_extra_config": {{"path": "x", {extra}}}}}', extra.split('"')[1])
            for extra in ('"max_size": "big"', '"load_timeout": 0', '"io_threads": 1.5', '"load_timeout": true')
        ),
    ],
)
def test_wrong_settings_are_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_transfer_config(EngineArgs(model="m", kv_transfer_config=given))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        kv_transfer_config(EngineArgs(model="m", kv_cache_dir="/kv", kv_transfer_config="{}"))
    with pytest.raises(ConfigError, match="prefix caching"):
        kv_transfer_config(EngineArgs(model="m", kv_cache_dir="/kv", enable_prefix_caching=False))
