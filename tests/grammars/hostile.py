"""Grammars that take gigabytes, minutes, or cubic parser time; and a function that lists child processes."""

from __future__ import annotations

import os
import subprocess
from typing import Any

# A schema of 1.9 kB. Compiling took 5.3 GB after 70 s and did not end.
PATTERNS: dict[str, Any] = {
    "json": {"allOf": [{"type": "string", "pattern": f"(x|y){{{i}}}z.*{i}"} for i in range(1, 39)]}
}
# Compiling took 23 s and 1.3 GB.
NESTED_REPEATS = {"regex": "(a|bc?)*" * 15_000}


def cubic(num_rules: int) -> str:
    """Return a grammar whose parser rows take cubic time after three letters, which limits on counts do not bound."""
    numbers = range(num_rules)
    return "\n".join(
        [
            "start: /[ab]/ /[ab]/ /[ab]/ s t",
            "t: " + " | ".join(f"s X{i}" for i in numbers),
            "s: " + " | ".join(f"A y{i}" for i in numbers),
            "A: /[ab]/",
            *(f"y{i}: | Y{i}" for i in numbers),
            *(f'X{i}: "x{i}"' for i in numbers),
            *(f'Y{i}: "y{i}"' for i in numbers),
        ]
    )


def descendants(pid: int | None = None) -> set[int]:
    """Return the pids of a process's descendants. Default: those of this process."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat=,comm="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    parents = {int(row[0]): int(row[1]) for row in rows if row[2][0] != "Z" and row[3] != "ps"}
    found = {os.getpid() if pid is None else pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} | found
        if more == found:
            return found - {os.getpid() if pid is None else pid}
        found = more
