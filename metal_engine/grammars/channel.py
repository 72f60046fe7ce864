"""How a grammar's process hears and answers: messages over a socket, in this process and in a fork of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from metal_engine.grammars.messages import LENGTH, framed


def receive(channel: socket.socket) -> bytes:
    """The next message. Raises EOFError if nobody is at the other end."""
    return _receive_bytes(channel, *LENGTH.unpack(_receive_bytes(channel, LENGTH.size)))


def _receive_bytes(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def serve(channel: socket.socket, answer: Callable[[bytes], bytes | None]) -> None:
    """Answer the messages that come over a socket. Raises EOFError when nobody is at the other end."""
    while True:
        answered = answer(receive(channel))
        if answered is not None:
            channel.sendall(framed(answered))


class Fork:
    """A fork of this process that answers messages. It may end at any of them; there is no second one.

    Args:
        answer: called in the fork, with a message.
        inherited: a socket that is not the fork's.
    """

    def __init__(self, answer: Callable[[bytes], bytes | None], inherited: socket.socket) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                is_fork = os.fork() == 0
            except OSError:  # there are too many processes
                self._channel.close()
                return
            if is_fork:
                try:
                    self._channel.close()
                    inherited.close()
                    serve(theirs, answer)
                finally:
                    os._exit(0)  # whatever ended it: the closed socket tells

    @property
    def has_ended(self) -> bool:
        return self._channel.fileno() < 0

    def tell(self, message: bytes) -> None:
        """Send a message, unless the fork has ended."""
        if not self.has_ended:
            try:
                self._channel.sendall(framed(message))
            except OSError:
                self._channel.close()

    def ask(self, message: bytes) -> bytes | None:
        """Returns the answer to a message; None if the fork has ended."""
        self.tell(message)
        if not self.has_ended:
            try:
                return receive(self._channel)
            except (EOFError, OSError):
                self._channel.close()
        return None
