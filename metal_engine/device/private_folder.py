"""Folders to which only this process's user can write, so that code loaded from them is trusted.

Files and folders that a user other than this user and root could have written, or can replace, are rejected.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path


class NotPrivateError(OSError):
    """Raised if another user owns, or can write to, a folder or file. The message contains its path."""


def private_folder(path: Path) -> Path:
    """Create a private folder with mode 0700, or check that an existing folder is private and set its mode to 0700.

    Missing folders above the folder are also created with mode 0700.

    Returns:
        The absolute path of the folder, without links.

    Raises:
        NotPrivateError: the folder is a link or belongs to another user, other users can write to it, or other users
            can replace it or a folder above it.
        OSError: the folder cannot be created.
    """
    path = Path(os.path.abspath(path))
    for folder in (*reversed(path.parents), path):
        if not os.path.lexists(folder):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue  # another process has created it
    parent = path.parent.resolve(strict=True)
    for folder in (parent, *parent.parents):
        _check_trusted(folder)
    path = parent / path.name
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivateError(f"{path} is not a folder")
    check_ours(path, status)
    if status.st_mode & 0o077:
        path.chmod(0o700)  # prevents other users from replacing its content by links
    return path


def check_ours(path: Path | str, status: os.stat_result) -> None:
    """Raise NotPrivateError unless a file or folder belongs to this user and no other user may write to it."""
    if status.st_uid != os.geteuid():
        raise NotPrivateError(f"{path} belongs to another user (uid {status.st_uid})")
    if _is_open(status):
        mode = stat.S_IMODE(status.st_mode)
        raise NotPrivateError(f"{path} can be written by other users (mode {mode:04o}): remove it")


def _check_trusted(folder: Path) -> None:
    """Raise NotPrivateError if another user can replace the private folder, or a folder above it, in ``folder``."""
    status = os.stat(folder)
    # With user namespaces, as in containers, root's files may have another owner. The root folder then has the same
    # owner.
    if status.st_uid not in (0, os.geteuid(), os.stat("/").st_uid):
        raise NotPrivateError(f"{folder} belongs to another user (uid {status.st_uid})")
    if _is_open(status) and not status.st_mode & stat.S_ISVTX:
        raise NotPrivateError(f"{folder} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})")


def _is_open(status: os.stat_result) -> bool:
    """Return True if other users may write to the file or folder with this status.

    Write permission for a group that contains only this user does not count. Many systems have such groups.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid, os.geteuid())


@functools.cache
def _is_own_group(group_id: int, user_id: int) -> bool:
    try:
        user, group = pwd.getpwuid(user_id), grp.getgrgid(group_id)
    except KeyError:
        return False
    return user.pw_gid == group_id and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
