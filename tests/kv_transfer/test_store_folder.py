"""The directory of a KV store: files that no store made are never lost, and other users have no access."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_engine.errors import ConfigError
from metal_engine.kv_transfer.settings import kv_transfer_config
from metal_engine.kv_transfer.stores.base import StoreError
from metal_engine.kv_transfer.stores.choice import open_store
from metal_engine.kv_transfer.stores.disk import DiskStore
from metal_engine.kv_transfer.stores.store_folder import MARKER, NotAStoreError
from metal_engine.settings.args import EngineArgs
from tests.support.kv_blocks import ANOTHER_MODEL, FINGERPRINT, LAYOUT, hashes, make_layout, stored

SIZE = len(stored(0)[0][1])
DIGEST = "ab" * 32
# Files that a user may have: weights, in folders and with names increasingly similar to a store's.
USERS_FILES = (
    "adapter_model.safetensors",
    "model-00001-of-00002.safetensors",
    ".tmp-notes",
    f"{DIGEST}.safetensors",
    f"{FINGERPRINT}.safetensors",
    "lora/ab/adapter_model.safetensors",
    f"ab/{DIGEST}.safetensors",
    f"{FINGERPRINT}/model.safetensors",
    f"{FINGERPRINT}/{DIGEST}.safetensors",
    f"{FINGERPRINT}/.tmp-{'x' * 32}",
    f"{FINGERPRINT}/ab/model.safetensors",
    f"{FINGERPRINT}/ab/.tmp-old",
    f"{FINGERPRINT}/ab/{DIGEST}.safetensors.bak",
    f"{FINGERPRINT}/ab/{DIGEST[:-2]}.safetensors",
    f"{FINGERPRINT}/ab/{DIGEST.upper()}.safetensors",
    f"{FINGERPRINT}/cd/{DIGEST}.safetensors",
    f"{FINGERPRINT}/abc/{DIGEST}.safetensors",
    f"{FINGERPRINT}/ab/ab/{DIGEST}.safetensors",
    f"{FINGERPRINT[:-1]}/ab/{DIGEST}.safetensors",
    f"{FINGERPRINT}0/ab/{DIGEST}.safetensors",
)


def write_old(root: Path, *names: str) -> None:
    """Write files that are the oldest, and too large to be kept."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"mine" * SIZE)
        os.utime(root / name, (1, 1))


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- what lies in the directory -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", USERS_FILES)
def test_a_directory_with_other_files_is_refused_and_not_changed(tmp_path: Path, name: str) -> None:
    write_old(tmp_path, name)
    before = tree(tmp_path)
    config = kv_transfer_config(EngineArgs(model="m", kv_cache_dir=str(tmp_path), kv_cache_dir_size=10 * SIZE))
    with pytest.raises(ConfigError, match=r"--kv-cache-dir.*name a new or an empty directory") as raised:
        open_store(config, make_layout())
    assert raised.value.flag == "--kv-cache-dir" and str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert tree(tmp_path) == before


def test_the_flag_that_is_named_is_the_users(tmp_path: Path) -> None:
    write_old(tmp_path, "model.safetensors")
    text = f'{{"kv_connector": "disk", "kv_role": "kv_both", "kv_connector_extra_config": {{"path": "{tmp_path}"}}}}'
    config = kv_transfer_config(EngineArgs(model="m", kv_transfer_config=text))
    with pytest.raises(ConfigError, match="name a new or an empty directory") as raised:
        open_store(config, LAYOUT)
    assert raised.value.flag == "--kv-transfer-config"


def test_user_files_in_a_store_are_never_removed(tmp_path: Path) -> None:
    """Opening, sweeping and evicting remove only blocks."""
    store = DiskStore(tmp_path, FINGERPRINT, max_size=10 * SIZE)
    store.put(stored(1))
    write_old(tmp_path, *USERS_FILES)
    before = {name: content for name, content in tree(tmp_path).items() if name in USERS_FILES}
    store = DiskStore(tmp_path, FINGERPRINT, max_size=10 * SIZE)
    store.put(stored(*range(100, 130)))
    DiskStore(tmp_path, ANOTHER_MODEL, max_size=1)
    after = tree(tmp_path)
    assert {name: after.get(name) for name in USERS_FILES} == before
    assert not any(store.contains(hashes(1, *range(100, 130))))


@pytest.mark.parametrize("lock", [".evicting", "lost+found", ".Spotlight-V100", ".fseventsd", ".Trashes", None])
def test_an_earlier_versions_store_is_taken_over(
    tmp_path: Path, lock: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, FINGERPRINT)
    store.put(stored(1, 2))
    (tmp_path / MARKER).unlink()
    (store.place(hashes(1)[0]).parent / f".tmp-{7:032x}").touch()
    if lock:
        (tmp_path / lock).touch()
    with caplog.at_level(logging.INFO):
        again = DiskStore(tmp_path, FINGERPRINT)
    assert "taken over" in caplog.text
    assert again.contains(hashes(1, 2)) == [True, True] and (tmp_path / MARKER).is_file()


@pytest.mark.parametrize(
    "content", [b"", b"metal-engine KV store, version 2\n", b"metal-engine KV store, version 1\n+"]
)
def test_a_marker_of_another_version_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARKER).write_bytes(content)
    with pytest.raises(NotAStoreError, match="has another version"):
        DiskStore(tmp_path, FINGERPRINT)


@pytest.mark.parametrize("path", ["~no-such-user/kv", "a\0b"])
def test_an_invalid_store_path_is_refused(path: str) -> None:
    with pytest.raises(NotAStoreError, match="is not a path"):
        DiskStore(path, FINGERPRINT)


def test_a_store_directory_replaced_by_other_files_is_not_changed(tmp_path: Path) -> None:
    """The store is removed while in use, and another thing takes its place."""
    root = tmp_path / "kv"
    store = DiskStore(root, FINGERPRINT, max_size=10 * SIZE)
    store.put(stored(1))
    shutil.rmtree(root)
    write_old(root, f"{FINGERPRINT}/00/{1:064x}.safetensors", "model.safetensors")
    before = tree(root)
    with pytest.raises(StoreError, match="name a new or an empty directory"):
        store.put(stored(0xAB << 248))
    with pytest.raises(StoreError, match="nothing is removed"):
        store.discard(hashes(1)[0])
    store._measure_and_evict()
    assert tree(root) == before


def test_readers_need_no_marker_and_remove_nothing_without_one(tmp_path: Path) -> None:
    DiskStore(tmp_path, FINGERPRINT).put(stored(1))
    (tmp_path / MARKER).unlink()
    before = tree(tmp_path)
    reader = DiskStore(tmp_path, FINGERPRINT, writable=False)
    assert len(reader.get(hashes(1))) == 1
    with pytest.raises(StoreError, match="nothing is removed"):
        reader.discard(hashes(1)[0])
    assert tree(tmp_path) == before
    assert DiskStore(tmp_path / "not made", FINGERPRINT, writable=False).get(hashes(1)) == []
    assert tree(tmp_path) == before


# --- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["root", "model", "digits"])
def test_links_are_not_followed_out_of_the_store(tmp_path: Path, which: str) -> None:
    """A folder is replaced by a link to a user's folder whose files have names of a store."""
    root, users = tmp_path / "kv", tmp_path / "mine"
    store = DiskStore(root, FINGERPRINT, max_size=10 * SIZE)
    store.put(stored(1))
    place = store.place(hashes(1)[0])
    folder = {"root": root, "model": place.parent.parent, "digits": place.parent}[which]
    shutil.move(folder, users)
    folder.symlink_to(users)
    write_old(users, *(name for name in tree(users) if name.endswith(".safetensors")))
    before = tree(users)
    for use in (lambda: store.put(stored(1)), lambda: store.get(hashes(1)), lambda: store.discard(hashes(1)[0])):
        with pytest.raises(StoreError):
            use()
    if which != "root":
        DiskStore(root, FINGERPRINT, max_size=1)
    assert tree(users) == before and folder.is_symlink()


def test_a_block_that_is_a_link_or_no_file_is_not_read(tmp_path: Path) -> None:
    root, users = tmp_path / "kv", tmp_path / "mine.safetensors"
    store = DiskStore(root, FINGERPRINT)
    store.put(stored(1, 2))
    link, pipe = (store.place(block_hash) for block_hash in hashes(1, 2))
    shutil.move(link, users)
    link.symlink_to(users)
    pipe.unlink()
    os.mkfifo(pipe)
    before = users.read_bytes()
    for seed in (1, 2):
        with pytest.raises(StoreError, match="cannot read"):
            store.get(hashes(seed))
    store.put(stored(1, 2))
    assert len(store.get(hashes(1, 2))) == 2 and not link.is_symlink() and users.read_bytes() == before


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "volume")
    DiskStore(tmp_path / "kv", FINGERPRINT).put(stored(1))
    assert DiskStore(tmp_path / "volume", FINGERPRINT).contains(hashes(1)) == [True]


# --- access permissions -----------------------------------------------------------------------------------------

_STORE = """
import logging, os, sys
from metal_engine.kv_transfer.stores.base import StoreError
from metal_engine.kv_transfer.stores.disk import DiskStore
root, user = sys.argv[1], int(sys.argv[2])
logging.basicConfig()
os.umask(0)
os.setresgid(user, user, user)
os.setresuid(user, user, user)
try:
    DiskStore(root, "0123456789abcdef" * 2).put([(bytes(32), b"block")])
except StoreError as error:
    sys.exit(str(error))
"""


def put_as(user: int, root: Path) -> subprocess.CompletedProcess[str]:
    """Put a block into a store as a given user, with umask 0."""
    return subprocess.run([sys.executable, "-c", _STORE, root, str(user)], capture_output=True, text=True)


def test_folders_and_files_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    assert put_as(os.getuid(), tmp_path / "a" / "kv").returncode == 0
    made = list((tmp_path / "a").rglob("*"))
    assert len(made) == 5
    for path in (tmp_path / "a", *made):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_store_that_other_users_can_access_gets_mode_0700(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    DiskStore(tmp_path, FINGERPRINT).put(stored(1))
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o777)
    DiskStore(tmp_path, FINGERPRINT)
    assert [mode(folder) for folder in folders] == [0o700] * 3
    assert "was open to other users (mode 0777); it is 0700 now" in caplog.text
    caplog.clear()
    DiskStore(tmp_path, FINGERPRINT)
    assert not caplog.records


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may enter. pytest's own folders belong to one user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@as_root
def test_a_store_directory_of_another_user_except_root_is_refused(shared: Path) -> None:
    """The mount point of a volume belongs to root; another user's directory belongs to that user."""
    for name, owner, problem, warning in (
        ("stranger", 12346, "belongs to another user", ""),
        ("volume", 0, "", "other users can write there"),
        ("own", 12345, "", "was open to other users"),
    ):
        root = shared / name
        root.mkdir()
        os.chown(root, owner, owner)
        root.chmod(0o777)
        done = put_as(12345, root)
        assert (done.returncode != 0) == bool(problem), done.stderr
        assert problem in done.stderr and warning in done.stderr
        assert (root / MARKER).exists() != bool(problem)
