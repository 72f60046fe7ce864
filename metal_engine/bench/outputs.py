"""Files that a benchmark is to write, tried before it runs: an hour is not to be lost for the name of a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from metal_engine.errors import ConfigError


def check_output(path: str | None, flag: str) -> None:
    """Make the folder of a file that ``flag`` names; None names none.

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
        raise ConfigError(
            flag, f"cannot write to {folder} ({flag}): {error.strerror}", is_whole=True
        ) from error
    if Path(path).is_dir():
        raise ConfigError(flag, f"must name a file, and {path} is a folder")
