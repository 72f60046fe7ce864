"""Child side of a process that forks itself for each piece of work."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from metal_engine.forks.channel import framed


def serve_forks(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Report over ``control`` that the process is ready. Then fork for each socket received, until ``control`` closes.

    After the report, the standard error of this process and its forks is discarded.

    Args:
        work: function that is called in each fork with the received socket. The fork ends when the function returns.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are reaped automatically
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control.sendall(framed(b""))
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # the parent has stopped reading it
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        control.sendall(message)  # the parent may close the socket
        with socket.socket(fileno=descriptors[0]) as channel:
            try:
                is_fork = os.fork() == 0
            except OSError as error:
                with suppress(OSError):  # the peer may have closed the socket
                    channel.sendall(framed(f"cannot be served, because no process can be started: {error}".encode()))
                continue
            if is_fork:
                try:
                    control.close()
                    work(channel)
                finally:
                    os._exit(0)  # on any error, the closed socket notifies the parent
