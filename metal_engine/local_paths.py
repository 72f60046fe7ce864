"""Expands the paths that users give in settings and commands."""

from __future__ import annotations

import os
from pathlib import Path


def local_path(given: str | Path) -> Path:
    """Return a path with the home directory in place of a leading ``~`` or ``~user``.

    If the user or the home directory is unknown, the path is returned unchanged, and then counts as missing. Unlike
    ``Path.expanduser``, raises no errors.
    """
    try:
        return Path(os.path.expanduser(given))
    except ValueError:  # a null character in the user's name
        return Path(given)
