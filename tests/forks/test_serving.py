"""Failures of a process that forks itself for each piece of work."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from metal_engine.forks.channel import receive

ROOT = Path(__file__).resolve().parents[2]
# A forking process that cannot fork.
SCRIPT = """
import os
from metal_engine.forks.serving import serve_forks
from metal_engine.python_process import channel_to_parent

def fork():
    raise OSError("no more processes")

os.fork = fork
serve_forks(channel_to_parent(), lambda channel: None)
"""


def test_a_failed_fork_for_a_peer_that_has_gone_does_not_end_the_process() -> None:
    control, theirs = socket.socketpair()
    with control, theirs:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdin=theirs)
        theirs.close()
        assert receive(control) == b"", "it is ready"
        gone, channel = socket.socketpair()
        gone.close()
        socket.send_fds(control, [b"f"], [channel.fileno()])
        assert control.recv(1) == b"f", "it has received the socket"
        ours, channel = socket.socketpair()
        socket.send_fds(control, [b"f"], [channel.fileno()])
        assert control.recv(1) == b"f"
        channel.close()
        assert receive(ours) == b"cannot be served, because no process can be started: no more processes"
        ours.close()
    assert process.wait() == 0
