"""Ends ranks that would wait for ever for one that has gone, or never comes, while they join their group.

MLX holds Python's lock as long as a process waits for the others, so no thread of it can notice. A process beside it
does: for all ranks that rank 0 has started on this machine, or else for the one that a launcher has started.

Run as a module: ``python -m metal_engine.distributed.rendezvous WATCHED``. Loads no MLX.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_MODULE = "metal_engine.distributed.rendezvous"
# What a watched process says when it waits for nobody any more. A pipe that ends without it has lost its process.
_MET = b"."
_PART_SECONDS = 0.5
# For a process to end by itself, before it is killed; and to list processes.
_END_SECONDS, _LIST_SECONDS = 1.0, 10.0
# From a terminal, or to a process group: this process ends with those that it watches.
_NOT_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Watched:
    """A rank that joins its group.

    Attributes:
        name: in messages.
        pid: its process.
        life_line: descriptor of a pipe that ends when the process does.
    """

    name: str
    pid: int
    life_line: int


@contextmanager
def watched_meeting(name: str, others: Sequence[Watched], seconds: float, leftover: Path | None) -> Iterator[None]:
    """Have a process end this one, and others on this machine, if one of them goes or the block takes too long.

    It ends with status 1 then (see :func:`ended_by_hang_up`), after a line that says why.

    Args:
        name: of this rank.
        others: that are to be watched and ended, too; they are within :func:`ended_by_hang_up`, or not as far yet.
        seconds: that the block may take.
        leftover: a file to remove with the ranks.
    """
    # Descriptor 0 is the pipe from this process.
    watched = [Watched(name, os.getpid(), 0), *others]
    listed = [asdict(one) for one in watched]
    told = json.dumps({"watched": listed, "seconds": seconds, "leftover": str(leftover or "")})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with ended_by_hang_up():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_HEARD)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, told],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[one.life_line for one in others],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert process.stdin is not None
        try:
            yield
        finally:
            with process.stdin as pipe, suppress(BrokenPipeError):  # it has ended, which is all that is wanted
                pipe.write(_MET)
            # It may not have begun yet; nobody waits for it.
            threading.Thread(target=process.wait, daemon=True).start()


@contextmanager
def ended_by_hang_up() -> Iterator[None]:
    """SIGHUP ends this process with status 1, whoever holds Python's lock.

    Its handler is C's own ``_exit``, which takes the number of the signal, 1, for the status.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = libc.signal(signal.SIGHUP, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGHUP, before)


# --- the process ---


def watch(watched: Iterable[Watched], seconds: float) -> str | None:
    """Wait until the first of some processes has met the others; says what has gone wrong, if something has.

    Seconds are counted in parts, so that none pass while a terminal has stopped this process along with the others.
    """
    lines = {one.life_line: one for one in watched}
    poll = select.poll()
    for line in lines:
        poll.register(line, select.POLLIN)
    num_left = max(round(seconds / _PART_SECONDS), 1)
    while num_left:
        ready = poll.poll(_PART_SECONDS * 1000)
        num_left -= not ready
        said = {line: os.read(line, 1) for line, _ in ready}
        if _MET in said.values():
            return None
        if said:
            gone = ", ".join(lines[line].name for line in sorted(said))
            return f"{gone} has gone while the ranks were joining their group"
    stopped = _stopped(lines.values())
    if stopped:
        return f"{', '.join(stopped)} has stopped: the ranks have not found each other within {seconds:g} s"
    return f"the ranks have not found each other within {seconds:g} s"


def _stopped(watched: Iterable[Watched]) -> list[str]:
    """Names of those processes that are stopped; none where the system has no ``ps`` to tell it."""
    pids = {one.pid: one.name for one in watched}
    command = ["ps", "-o", "pid=,state=", "-p", ",".join(map(str, pids))]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    states = dict(line.split()[:2] for line in listed.splitlines())
    return [name for pid, name in pids.items() if states.get(str(pid), "").startswith("T")]


def end_all(watched: Iterable[Watched]) -> None:
    """End processes with status 1; kill those that do not, such as stopped ones."""
    left = {one.life_line: one for one in watched}
    poll = select.poll()
    for line in left:
        poll.register(line, select.POLLIN)
    for number in (signal.SIGHUP, signal.SIGKILL):
        end = time.monotonic() + _END_SECONDS
        for line, _ in poll.poll(0):  # has ended already: its number may be another's
            poll.unregister(line)
            del left[line]
        for one in left.values():
            with suppress(ProcessLookupError):
                os.kill(one.pid, number)
        while left and (rest := end - time.monotonic()) > 0:
            for line, _ in poll.poll(rest * 1000):
                poll.unregister(line)
                del left[line]


def main() -> None:
    """Watch processes until they have met; else say a line, and end them."""
    told = json.loads(sys.argv[1])
    watched = [Watched(**one) for one in told["watched"]]
    problem = watch(watched, told["seconds"])
    if problem is None:
        return
    ends = f"{watched[0].name} ends" if len(watched) == 1 else "all of them end"
    print(f"CRITICAL {_MODULE}: {problem}: {ends}", file=sys.stderr, flush=True)
    end_all(watched)
    if told["leftover"]:
        Path(told["leftover"]).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
