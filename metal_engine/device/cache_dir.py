"""Folder for downloads and other files that can be recreated."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: ``METAL_ENGINE_CACHE``, or else ``metal-engine`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Does not create the folder.

    Raises:
        FileNotFoundError: neither variable is set and the user has no home directory.
    """
    own = os.environ.get("METAL_ENGINE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base).expanduser() / "metal-engine"
    try:
        return Path.home() / ".cache" / "metal-engine"
    except RuntimeError as error:
        raise FileNotFoundError(f"no home directory to keep a cache in: {error}") from error
