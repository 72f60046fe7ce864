"""Starts other Python processes with the import path of this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

# Without -P, the options -m and -c import from the current folder, which can have files of other users. With
# python_environment(), modules are imported from the current folder only if this process does so.
PYTHON = (sys.executable, "-P")


def python_environment() -> dict[str, str]:
    """Return this process's environment, with its import path as ``PYTHONPATH``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def start_python(module: str, channel: socket.socket, **streams: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` with a socket as its standard input. The process calls :func:`channel_to_parent`.

    On macOS 26, a fork of a process that has used the network can crash before the new program starts, because a fork
    handler of Apple's Network framework fails. There, :mod:`subprocess` uses posix_spawn instead of fork, but only
    without ``close_fds``, ``pass_fds`` and ``start_new_session``. Python's own descriptors are closed in any case.

    Args:
        module: name of the module.
        channel: socket for the new process.
        streams: ``stdout`` and ``stderr`` of :class:`subprocess.Popen`.

    Raises:
        OSError: the process cannot be started.
    """
    forks = sys.platform != "darwin"
    command = [*PYTHON, "-m", module]
    environment = python_environment()
    return subprocess.Popen(
        command, stdin=channel.fileno(), env=environment, close_fds=forks, start_new_session=forks, **streams
    )


def channel_to_parent() -> socket.socket:
    """Return the socket that :func:`start_python` has passed to this process. Standard input is empty from then on.

    Call it once, at the start. It begins a new session, so that a terminal's interrupt does not reach this process.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), sys.stdin.fileno())
    return channel
