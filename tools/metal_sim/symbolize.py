"""Translates addresses inside a compiled kernel to lines of its source."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .errors import Place
from .toolchain import INCLUDE, symbolizer


def place_of(library: Path, offset: int) -> Place | None:
    """Return the source line of a return address, an offset into the library; None if the line is unknown.

    Frames inside this package's own headers (inlined functions of the standard library) are replaced by the calling
    line.
    """
    if offset <= 0:
        return None
    # The call is the instruction before the return address.
    done = subprocess.run(
        [*symbolizer(), "-e", str(library), hex(offset - 1)], capture_output=True, text=True, check=False
    )
    places = []
    for line in done.stdout.splitlines():
        file, _, number = line.strip().rpartition(":")
        number = number.split(" ")[0]
        if number.isdigit() and file not in ("", "??"):
            places.append(Place(_short(file), int(number)))
    own = [p for p in places if "/metal_sim/" not in p.file and INCLUDE.name not in Path(p.file).parts]
    return (own or places or [None])[0]


def _short(file: str) -> str:
    """Return "kernel:source" for "/folder/kernel:source": debug information adds a folder to the names of ``#line``.

    Paths of files are returned unchanged.
    """
    base = file.rsplit("/", 1)[-1]
    return base if base.endswith((":source", ":header", ":generated")) else file
