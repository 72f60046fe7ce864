"""Tests folders for code: no other user may write to them, or replace them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_engine.device import private_folder as module
from metal_engine.device.private_folder import NotPrivateError, check_ours, private_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder directly below the temporary folder, where all users may write but not replace others' files."""
    folder = Path(tempfile.mkdtemp()).resolve()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_missing_folders_are_created_with_mode_0700(top: Path, no_umask: None) -> None:
    folder = private_folder(top / "a" / "b" / "c")
    assert folder == top / "a" / "b" / "c"
    assert [mode(path) for path in (folder, *folder.parents[:3])] == [0o700] * 4
    assert private_folder(folder) == folder


def test_an_own_folder_that_other_users_can_read_gets_mode_0700(top: Path) -> None:
    (top / "a").mkdir()
    (top / "a").chmod(0o755)
    assert mode(private_folder(top / "a")) == 0o700


def test_links_in_the_parent_path_are_resolved_and_a_final_link_is_refused(top: Path) -> None:
    (top / "real").mkdir(mode=0o700)
    (top / "link").symlink_to(top / "real")
    assert private_folder(top / "link" / "a") == top / "real" / "a"
    with pytest.raises(NotPrivateError, match="link is not a folder"):
        private_folder(top / "link")
    (top / "file").touch()
    with pytest.raises(NotPrivateError, match="file is not a folder"):
        private_folder(top / "file")


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o1777])
def test_a_folder_that_other_users_can_write_is_refused(top: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_own_group", lambda group, user: False)
    (top / "a").mkdir()
    (top / "a").chmod(bits)
    with pytest.raises(NotPrivateError, match=rf"a can be written by other users \(mode {bits:04o}\): remove it"):
        private_folder(top / "a")
    if bits != 0o1777:  # other users cannot replace our folder in a sticky folder
        with pytest.raises(NotPrivateError, match=rf"a can be written by other users \(mode {bits:04o}\)"):
            private_folder(top / "a" / "b")
    else:
        assert mode(private_folder(top / "a" / "b")) == 0o700


def test_a_group_writable_folder_is_accepted_if_the_group_has_one_user(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "a").mkdir()
    (top / "a").chmod(0o775)
    user = type("User", (), {"pw_gid": os.stat(top / "a").st_gid, "pw_name": "me"})
    group = type("Group", (), {"gr_name": "me", "gr_mem": []})
    monkeypatch.setattr(module.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(module.grp, "getgrgid", lambda gid: group)
    module._is_own_group.cache_clear()
    assert mode(private_folder(top / "a" / "b")) == 0o700
    for name, members in (("others", []), ("me", ["me", "you"])):
        group.gr_name, group.gr_mem = name, members
        module._is_own_group.cache_clear()
        with pytest.raises(NotPrivateError):
            private_folder(top / "a" / "b")
    module._is_own_group.cache_clear()


@as_root
def test_folders_of_another_user_are_refused(top: Path) -> None:
    (top / "theirs").mkdir()
    os.chown(top / "theirs", 12345, 12345)
    for folder in (top / "theirs", top / "theirs" / "a"):
        with pytest.raises(NotPrivateError, match=re.escape("theirs belongs to another user (uid 12345)")):
            private_folder(folder)


@as_root
def test_files_that_other_users_own_or_can_write_are_refused(top: Path) -> None:
    path = top / "lib.so"
    path.touch()
    check_ours(path, path.lstat())
    path.chmod(0o666)
    with pytest.raises(NotPrivateError, match="mode 0666"):
        check_ours(path, path.lstat())
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(NotPrivateError, match="uid 12345"):
        check_ours(path, path.lstat())
