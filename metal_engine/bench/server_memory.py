"""Measures the peak memory of a server on this machine (Linux)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def server_peak_bytes(base_url: str) -> int | None:
    """Return the peak resident size of the process that listens at ``base_url``, with its children, in bytes.

    Returns None for a server on another machine, and on systems without ``/proc``, such as macOS. The peaks of several
    processes are added, although the peaks may have been at different times.
    """
    url = urlsplit(base_url)
    if url.hostname not in _LOCAL or not Path("/proc/net/tcp").exists():
        return None
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(url.port or (443 if url.scheme == "https" else 80))}
    processes = [process for folder in Path("/proc").glob("[0-9]*") if (process := _process(folder, wanted))]
    family = {process.pid for process in processes if process.listens}
    while children := {process.pid for process in processes if process.parent in family} - family:
        family |= children
    return sum(process.peak for process in processes if process.pid in family) or None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            columns = line.split()
            # Columns: local address, state (0A is listening), inode of the socket.
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(columns[9])
    return inodes


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    peak: int  # bytes
    listens: bool


def _process(folder: Path, sockets: set[str]) -> _Process | None:
    """Read a process from its folder in /proc. None if the process has ended."""
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    except OSError:
        return None
    listens = False
    with contextlib.suppress(OSError):  # a process of another user, or a file closed in the meantime
        listens = any(str(fd.readlink()) in sockets for fd in (folder / "fd").iterdir())
    peak = int(status.get("VmHWM", "0 kB").split()[0]) * 1024
    return _Process(int(folder.name), int(status["PPid"]), peak, listens)
