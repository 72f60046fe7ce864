"""Folder for downloads and other files that can be recreated."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: ``METAL_ENGINE_CACHE``, or else ``metal-engine`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Does not create the folder.

    Raises:
        FileNotFoundError: the path needs the user's home directory, which is unknown.
    """
    own = os.environ.get("METAL_ENGINE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).expanduser() if own else Path(base or "~/.cache").expanduser() / "metal-engine"
    except RuntimeError as error:
        raise FileNotFoundError(f"no home directory to keep a cache in: {error}") from error
