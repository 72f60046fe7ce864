"""Bounded exchange of framed messages over a Unix socket.

A frame is the length of the message (4 bytes, little-endian) and the message.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import threading
from contextlib import suppress

from metal_engine.engine.process.wire import Message, WireError, encode

_LENGTH = struct.Struct("<I")
# Maximum size of a message in bytes. Log probabilities of a prompt take 300 bytes a token, and one image up to 512 MiB.
MAX_MESSAGE_BYTES = 1 << 30
# Unsent bytes beyond which sending blocks, if the channel may block.
_MAX_UNSENT_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20
# Minimum room in the buffer of a socket that macOS reports as writable (MCLBYTES).
_WRITABLE_BYTES = 2048


class Channel:
    """One end of a socket pair. Several threads may send. One thread receives.

    A message is written at once if the socket has room. Otherwise, a thread writes it.

    Args:
        sock: connected stream socket in blocking mode. Belongs to the channel.
        stall_seconds: time after which the channel is closed if the peer reads nothing. Sending then never blocks. None
            keeps the channel open, and sending blocks while 64 MiB or more are unsent.

    Attributes:
        problem: reason why this end has closed the channel; empty without a reason.
    """

    def __init__(self, sock: socket.socket, stall_seconds: float | None = None) -> None:
        self.problem = ""
        self._sock = sock
        self._stall_seconds = stall_seconds
        with suppress(OSError):  # macOS: the peer has closed the socket, which `receive` reports
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            if stall_seconds is not None:
                seconds, rest = divmod(stall_seconds, 1.0)
                limit = struct.pack("ll", int(seconds), int(rest * 1e6))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._reader = sock.makefile("rb", buffering=_BUFFER_BYTES)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._unsent = bytearray()
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="engine-outbox", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, or append it to the unsent bytes. May block if the channel has no ``stall_seconds``.

        If this end is closed or the peer has closed the socket, the message is dropped.

        Raises:
            WireError: the message is too large. Nothing is sent.
        """
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
        frame = _LENGTH.pack(len(data)) + data
        with self._changed:
            if self._stall_seconds is None:
                self._changed.wait_for(lambda: len(self._unsent) < _MAX_UNSENT_BYTES or self._is_closed)
            if self._is_closed:
                return
            try:
                num_sent = 0 if self._unsent else self._send_now(frame)
            except OSError:  # the peer has closed the socket
                return
            if num_sent < len(frame):
                self._unsent += frame[num_sent:]
                self._changed.notify_all()

    def _send_now(self, frame: bytes) -> int:
        """Send a part of a frame without blocking. Return its size in bytes. Raises OSError if the socket is closed."""
        # macOS ignores MSG_DONTWAIT here, so that a frame without room would block.
        if sys.platform == "darwin" and (len(frame) > _WRITABLE_BYTES or not self._writable.poll(0)):
            return 0
        try:
            return self._sock.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive(self) -> bytes:
        """Wait for a message and return it.

        Raises:
            EOFError: the peer has closed the socket, or this end was closed.
            WireError: the frame is larger than ``MAX_MESSAGE_BYTES``.
        """
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        try:
            data = self._reader.read(size)
        except (OSError, ValueError):  # reset by the peer, or closed by this end
            data = b""
        if len(data) < size:
            raise EOFError
        return data

    def _write(self) -> None:
        """Send the unsent bytes. Runs in its own thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_closed)
                if self._is_closed:
                    return
                part = bytes(self._unsent[:_WRITE_BYTES])
            try:
                num_sent = self._sock.send(part)
            except BlockingIOError:
                self.problem = f"it has read no message for {self._stall_seconds:g} s"
                self.close()
                return
            except OSError:  # the peer has closed the socket
                self.close()
                return
            with self._changed:
                del self._unsent[:num_sent]
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is sent, or the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent or self._is_closed)

    def close(self) -> None:
        """Close the channel, and drop unsent messages. A thread in :meth:`receive` gets an EOFError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
