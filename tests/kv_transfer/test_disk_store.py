"""Blocks in a directory: least recently used blocks go first, several processes, errors of the file system."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metal_engine.kv_transfer.stores import disk
from metal_engine.kv_transfer.stores.base import StoreError
from metal_engine.kv_transfer.stores.disk import DiskStore
from metal_engine.kv_transfer.stores.store_folder import MARKER
from tests.support.kv_blocks import (
    ANOTHER_MODEL,
    FINGERPRINT,
    LAYOUT,
    block,
    check_get_ends_at_the_first_missing_block,
    hashes,
    stored,
)


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


def test_a_removed_store_directory_is_created_again(tmp_path: Path) -> None:
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
from metal_engine.kv_transfer.stores.disk import DiskStore
from tests.support.kv_blocks import FINGERPRINT, stored
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
from metal_engine.kv_transfer.stores.disk import DiskStore
from tests.support.kv_blocks import FINGERPRINT, stored
root, kills = sys.argv[1], int(sys.argv[2])
size = 40 * len(stored(0)[0][1])
blocks = [stored(seed)[0] for seed in range(50)]
rng = random.Random(0)
ready, begun = os.pipe()
for kill in range(kills):
    pid = os.fork()
    if pid == 0:
        store = DiskStore(root, FINGERPRINT, max_size=size)
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


def test_blocks_written_by_two_processes_at_once_are_never_corrupt(tmp_path: Path) -> None:
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
