"""The peak memory of a server on this machine, where the system tells it (Linux)."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

_LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def server_peak_bytes(base_url: str) -> int | None:
    """Largest resident size so far of the process that listens at ``base_url``, with its children, in bytes.

    None where the server is on another machine, or the system does not tell.

    Peaks of several processes are added up, so their sum may be more than was ever used at one time.
    """
    url = urlsplit(base_url)
    if url.hostname not in _LOCAL or not Path("/proc/net/tcp").exists():
        return None
    listeners = _processes_with(_listening_inodes(url.port or (443 if url.scheme == "https" else 80)))
    family = set(listeners)
    parents = _parents()
    for pid in parents:
        ancestor = pid
        while ancestor := parents.get(ancestor, 0):
            if ancestor in listeners:
                family.add(pid)
    return sum(_peak(pid) for pid in family) or None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            columns = line.split()
            # Local address, state 0A (listening), inode of the socket.
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(columns[9])
    return inodes


def _processes_with(inodes: set[str]) -> set[int]:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in wanted for fd in (folder / "fd").iterdir()):
                found.add(int(folder.name))
        except OSError:  # another user's, or it has ended
            continue
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent ...", and a name may hold anything.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return parents


def _peak(pid: int) -> int:
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
