"""Folders that nobody but this process's user can write to: code that is loaded from one is our own.

What another user could have put, or can still exchange, is refused. Root and the user are trusted, nobody else.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path


class NotPrivateError(OSError):
    """Others can write to a folder or file, or it is theirs. The message names it."""


def private_folder(path: Path) -> Path:
    """Make a folder with mode 0700, or check that an existing one is ours alone and give it that mode.

    Returns:
        its path, absolute, without links.

    Raises:
        NotPrivateError: others can write to it, it is another user's or a link; or others can exchange it, or a folder
            above it.
        OSError: it cannot be made.
    """
    path = Path(os.path.abspath(path))
    for folder in (*reversed(path.parents), path):
        if not os.path.lexists(folder):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue  # another process was faster
    parent = path.parent.resolve(strict=True)
    for folder in (parent, *parent.parents):
        _check_trusted(folder)
    path = parent / path.name
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivateError(f"{path} is no folder")
    check_ours(path, status)
    if status.st_mode & 0o077:
        path.chmod(0o700)  # nobody else can exchange it for a link
    return path


def check_ours(path: Path | str, status: os.stat_result) -> None:
    """Check that a file or folder is this user's and nobody else may write to it. Raises NotPrivateError."""
    if status.st_uid != os.geteuid():
        raise NotPrivateError(f"{path} belongs to another user (uid {status.st_uid})")
    if _is_open(status):
        mode = stat.S_IMODE(status.st_mode)
        raise NotPrivateError(f"{path} can be written by other users (mode {mode:04o}): remove it")


def _check_trusted(folder: Path) -> None:
    """Check that nobody else can exchange what is in a folder above ours. Raises NotPrivateError."""
    status = os.stat(folder)
    # Where users are mapped (in a container), root's files may have another owner, as the root folder then does.
    if status.st_uid not in (0, os.geteuid(), os.stat("/").st_uid):
        raise NotPrivateError(f"{folder} belongs to another user (uid {status.st_uid})")
    if _is_open(status) and not status.st_mode & stat.S_ISVTX:
        raise NotPrivateError(f"{folder} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})")


def _is_open(status: os.stat_result) -> bool:
    """Whether other users may write. A user's own group, as many systems make one for each user, has no others."""
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
