"""Framed messages over a stream socket, and forks of this process that answer messages.

A frame is the length of the message in bytes (4 bytes, little-endian), followed by the message.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

LENGTH = struct.Struct("<I")
# Size of a socket's buffer, enough for a dozen masks of a grammar, so that a process rarely waits for its peer to read.
BUFFER_BYTES = 1 << 18


def framed(message: bytes) -> bytes:
    """Return the frame of a message."""
    return LENGTH.pack(len(message)) + message


def receive(channel: socket.socket) -> bytes:
    """Receive the next message. Raises EOFError if the peer has closed the socket."""
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
    """Answer messages from a socket until the peer closes it. Never returns: raises EOFError at the end.

    Args:
        answer: function that returns the answer to a message, or None to send no answer. Its errors are passed on.
    """
    while True:
        answered = answer(receive(channel))
        if answered is not None:
            channel.sendall(framed(answered))


class Fork:
    """Fork of this process that answers messages.

    The fork may end at any message, and is not replaced. It does not start if the system has too many processes.
    :attr:`has_ended` is True after the first :meth:`send` or :meth:`ask` that fails, and from the beginning if the fork
    did not start.

    Args:
        answer: function that answers a message (:func:`serve`). Called in the fork.
        inherited: socket of the parent that the fork must not keep open. The fork closes it.
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
                    os._exit(0)  # on any error, the closed socket notifies the parent

    @property
    def has_ended(self) -> bool:
        return self._channel.fileno() < 0

    def send(self, message: bytes) -> None:
        """Send a message that has no answer, unless the fork has ended."""
        if not self.has_ended:
            try:
                self._channel.sendall(framed(message))
            except OSError:
                self._channel.close()

    def ask(self, message: bytes) -> bytes | None:
        """Send a message and return the answer; None if the fork has ended."""
        self.send(message)
        if not self.has_ended:
            try:
                return receive(self._channel)
            except (EOFError, OSError):
                self._channel.close()
        return None
