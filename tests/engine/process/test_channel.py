"""Messages between the server and an engine's process."""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any

import pytest

from metal_engine.engine.process import wire
from metal_engine.engine.process.channel import Channel


class MacSocket(socket.socket):
    """Socket that sends as on macOS: it ignores MSG_DONTWAIT, and blocks until everything is in the buffer."""

    def send(self, data: Any, flags: int = 0) -> int:
        self.sendall(data)
        return len(data)


def test_sending_does_not_block_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(MacSocket(fileno=ours.detach())), Channel(theirs)
    texts = ["a", "b" * (8 << 20), "c"]

    def send() -> None:
        for text in texts:
            sender.send(wire.Ended(text))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [wire.decode_from_engine(receiver.receive()).message for _ in texts] == texts  # type: ignore[union-attr]
    sender.close()
    receiver.close()
