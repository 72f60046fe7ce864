"""Tries the files that a benchmark will write before it runs, so that no long run is lost for a wrong name."""

from __future__ import annotations

import tempfile
from pathlib import Path

from metal_engine.errors import ConfigError


def check_output(path: str | None, flag: str) -> None:
    """Check that a file can be written, and make its folder. None stands for no file.

    Args:
        flag: names the file, for the message.

    Raises:
        ConfigError: the file could not be written.
    """
    if path is None:
        return
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(flag, f"cannot write to {folder} ({flag}): {error.strerror}") from error
    if Path(path).is_dir():
        raise ConfigError(flag, f"must name a file, and {path} is a folder")
