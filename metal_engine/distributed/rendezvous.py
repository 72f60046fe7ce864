"""Monitor process that ends ranks if a rank is missing when they join their group. They would otherwise wait forever.

While a process waits for the other ranks, MLX holds the GIL, so no thread of that process can detect the missing rank.
The monitor is therefore a separate process. It watches rank 0 and all ranks that rank 0 has started on this machine, or
one rank that a launcher has started.

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

from metal_engine.python_process import PYTHON, python_environment

_MODULE = "metal_engine.distributed.rendezvous"
# Written by a watched process that has joined. If its pipe is closed without it, the process was lost.
_JOINED = b"."
# The time limit is counted in parts of this length.
_PART_SECONDS = 0.5
# Seconds for a process to end by itself before it is killed, and time limit in seconds for listing processes.
_END_SECONDS, _LIST_SECONDS = 1.0, 10.0
# Signals that a terminal or a process group sends. The monitor ignores them, and ends with its watched processes.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Watched:
    """Rank that is joining its group.

    Attributes:
        name: name of the rank in messages.
        pid: id of its process.
        life_line: read end of a pipe. The pipe reaches its end when the process ends.
    """

    name: str
    pid: int
    life_line: int


@contextmanager
def monitored_rendezvous(name: str, others: Sequence[Watched], seconds: float, leftover: Path | None) -> Iterator[None]:
    """Monitor this process and ``others`` while the block joins their group. All of them run on this machine.

    If one of these processes is lost, or the block takes longer than ``seconds``, a monitor process ends them all with
    exit status 1 (:func:`ended_by_hang_up`). It first writes a line with the reason to the standard error.

    Args:
        name: name of this rank.
        others: other processes to watch and end. They are inside :func:`ended_by_hang_up`, or have not reached it yet.
        seconds: time limit of the block.
        leftover: file to remove when the ranks are ended.
    """
    # Descriptor 0 is the pipe from this process.
    watched = [Watched(name, os.getpid(), 0), *others]
    listed = [asdict(one) for one in watched]
    parameters = json.dumps({"watched": listed, "seconds": seconds, "leftover": str(leftover or "")})
    with ended_by_hang_up():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
        try:
            process = subprocess.Popen(
                [*PYTHON, "-m", _MODULE, parameters],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=python_environment(),
                pass_fds=[one.life_line for one in others],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert process.stdin is not None
        try:
            yield
        finally:
            with process.stdin as pipe, suppress(BrokenPipeError):  # the monitor has ended already
                pipe.write(_JOINED)
            # The monitor may not have started yet, so wait for its end in a thread.
            threading.Thread(target=process.wait, daemon=True).start()


@contextmanager
def ended_by_hang_up() -> Iterator[None]:
    """Within this context, make SIGHUP end this process with status 1, even while another thread holds the GIL.

    The handler is the C function ``_exit``. It receives the number of the signal, 1, as the status.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = libc.signal(signal.SIGHUP, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGHUP, before)


# --- the monitor process ---


def watch(watched: Iterable[Watched], seconds: float) -> str | None:
    """Wait until one of the processes has joined the group. Processes join only when all ranks of the group are there.

    Time is counted in parts, so that it does not advance while a terminal has stopped this process together with the
    watched processes.

    Returns:
        None if a process has joined, otherwise a description of the problem: a process was lost, or ``seconds`` have
        passed.
    """
    lines = {one.life_line: one for one in watched}
    poll = select.poll()
    for line in lines:
        poll.register(line, select.POLLIN)
    num_left = max(round(seconds / _PART_SECONDS), 1)
    while num_left:
        ready = poll.poll(_PART_SECONDS * 1000)
        num_left -= not ready
        received = {line: os.read(line, 1) for line, _ in ready}
        if _JOINED in received.values():
            return None
        if received:
            gone = ", ".join(lines[line].name for line in sorted(received))
            return f"{gone} has gone while the ranks were joining their group"
    stopped = _stopped(lines.values())
    if stopped:
        return f"{', '.join(stopped)} has stopped: the ranks have not found each other within {seconds:g} s"
    return f"the ranks have not found each other within {seconds:g} s"


def _stopped(watched: Iterable[Watched]) -> list[str]:
    """Return the names of suspended processes (SIGSTOP); an empty list if the system has no ``ps``."""
    pids = {one.pid: one.name for one in watched}
    command = ["ps", "-o", "pid=,state=", "-p", ",".join(map(str, pids))]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    states = dict(line.split()[:2] for line in listed.splitlines())
    return [name for pid, name in pids.items() if states.get(str(pid), "").startswith("T")]


def end_all(watched: Iterable[Watched]) -> None:
    """Make processes exit with status 1. A process that does not exit in time is killed, even if suspended."""
    left = {one.life_line: one for one in watched}
    poll = select.poll()
    for line in left:
        poll.register(line, select.POLLIN)
    for number in (signal.SIGHUP, signal.SIGKILL):
        end = time.monotonic() + _END_SECONDS
        for line, _ in poll.poll(0):  # an ended process: its pid may be reused
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
    """Watch processes until they have joined. On a problem, print a line and end them."""
    parameters = json.loads(sys.argv[1])
    watched = [Watched(**one) for one in parameters["watched"]]
    problem = watch(watched, parameters["seconds"])
    if problem is None:
        return
    ends = f"{watched[0].name} ends" if len(watched) == 1 else "all of them end"
    print(f"CRITICAL {_MODULE}: {problem}: {ends}", file=sys.stderr, flush=True)
    end_all(watched)
    if parameters["leftover"]:
        Path(parameters["leftover"]).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
