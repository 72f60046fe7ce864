"""What rank 0 and the other ranks tell each other beside the collectives: frames over TCP, with heartbeats.

A frame is a length, 4 bytes, most significant first; a :class:`Kind`, 1 byte; and its content. A rank without work
sleeps in ``recv``; heartbeats come from a thread of their own, so a rank that loads or computes for long is not
silent, and one that hangs as a whole, sleeps or is cut off is.
"""

from __future__ import annotations

import hmac
import logging
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# A plan with 256 new prompts of 100,000 tokens has 180 MiB.
MAX_FRAME = 1 << 28
TOKEN_BYTES = 16
_HEADER = struct.Struct(">IB")
HEADER_BYTES = _HEADER.size
_RANK = struct.Struct(">I")
# Heartbeats in the time after which a rank counts as lost; and seconds between two at most.
_BEATS, _MAX_BEAT_SECONDS = 5, 2.0
# Parts in which silence is counted; and by how much a wait is longer than asked for in a process that was stopped.
_SLICES, _STALL_SECONDS = 10, 1.0
# What a connection may take in all to say who it is, and how many may be about to.
_GREETING_SECONDS = 5.0
_MAX_GREETINGS = 64
# Rank 0's answer to a rank that it knows; and how long one that was turned away waits before it comes again.
_WELCOME = b"\x01"
_AGAIN_SECONDS = 0.2


class Kind(IntEnum):
    """What a frame is."""

    BEAT = 0
    PLAN = 1  # a step to start
    FINISH = 2  # the oldest step under way is to be finished
    DROP = 3  # requests of a plan that was refused
    FIGURES = 4  # facts about a rank, or about all
    LOST = 5  # a rank has been lost, or has failed; everybody ends
    QUIT = 6  # rank 0 ends as it should


class Link:
    """A connection to another rank.

    Args:
        name: of the other rank, in messages.
        timeout: seconds of silence after which it counts as lost.
        on_lost: called with what has happened to it, in another thread.
    """

    def __init__(self, connection: socket.socket, name: str, timeout: float, on_lost: Callable[[str], None]) -> None:
        self.name = name
        self._connection = connection
        self._timeout = timeout
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._is_closing = False
        self._inbox: queue.SimpleQueue[tuple[Kind, bytes]] = queue.SimpleQueue()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of sending only: reading counts silence by itself.
        connection.settimeout(timeout)

    def start(self) -> None:
        """Begin to read, and to send heartbeats."""
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"link to {self.name}", daemon=True).start()

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a frame.

        Raises:
            RunnerLostError: the other rank has gone.
        """
        try:
            with self._lock:
                self._connection.sendall(_HEADER.pack(len(content), kind) + content)
        except OSError as error:
            message = self._what_happened(error)
            self._lose(message)
            raise RunnerLostError(message) from error

    def receive(self, seconds: float | None = None) -> tuple[Kind, bytes]:
        """Wait for the next frame that is neither a heartbeat nor the end.

        Raises:
            TimeoutError: none has come in so many seconds.
        """
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None

    def wake(self) -> None:
        """Have whoever waits for a frame look at what has been lost."""
        self._inbox.put((Kind.LOST, b""))

    def close(self) -> None:
        """Nothing that happens to the other rank matters from now on."""
        self._is_closing = True

    def _lose(self, message: str) -> None:
        if not self._is_closing:
            self._on_lost(message)

    def _what_happened(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"{self.name} has been silent for {self._timeout:g} s"
        return f"{self.name} has gone ({error.strerror or error})"

    def _read(self) -> None:
        while True:
            try:
                kind, content = read_frame(self._connection, self._timeout)
            except OSError as error:
                self._lose(self._what_happened(error))
                return
            except ValueError as error:
                self._lose(f"{self.name} sends {error}")
                return
            if kind is Kind.LOST:
                self._on_lost(content.decode(errors="replace"))
            elif kind is Kind.QUIT:
                self._is_closing = True
                self._inbox.put((kind, content))
            elif kind is not Kind.BEAT:
                self._inbox.put((kind, content))

    def _beat(self) -> None:
        pause = min(self._timeout / _BEATS, _MAX_BEAT_SECONDS)
        while not self._is_closing:
            time.sleep(pause)
            try:
                self.send(Kind.BEAT)
            except RunnerLostError:
                return


def read_frame(connection: socket.socket, timeout: float) -> tuple[Kind, bytes]:
    """Wait for a frame.

    Raises:
        OSError: the other side has gone, or is silent for longer than ``timeout`` seconds.
        ValueError: what it sends is no frame.
    """
    length, kind = _HEADER.unpack(_exactly(connection, _HEADER.size, timeout))
    if length > MAX_FRAME or kind not in list(Kind):
        raise ValueError(f"what is no frame (kind {kind}, {length} bytes)")
    return Kind(kind), _exactly(connection, length, timeout)


def _exactly(connection: socket.socket, num_bytes: int, timeout: float) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        _wait_for_bytes(connection, timeout)
        part = connection.recv(min(num_bytes - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return bytes(received)


def _wait_for_bytes(connection: socket.socket, timeout: float) -> None:
    """Wait until there is something to read; TimeoutError after ``timeout`` seconds of silence.

    Where this process was itself stopped meanwhile, the silence tells nothing, and is counted anew.
    """
    part = timeout / _SLICES
    num_silent = 0
    poll = select.poll()  # of any file descriptor; select takes those below 1,024
    poll.register(connection, select.POLLIN)
    while num_silent < _SLICES:
        start = time.monotonic()
        if poll.poll(part * 1000):
            return
        num_silent = 0 if time.monotonic() - start > part + _STALL_SECONDS else num_silent + 1
    raise TimeoutError


# --- how ranks find each other ---


def listen(host: str) -> socket.socket:
    """Listen on a free port of one address: that under which the group knows rank 0."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def accept_ranks(listening: socket.socket, token: bytes, num_ranks: int, seconds: float) -> dict[int, socket.socket]:
    """Wait for ranks 1 to ``num_ranks - 1``; their connections, by rank.

    A connection that does not say the token is closed, and keeps nobody waiting: where too many are about to, the one
    that has taken longest makes room.

    Raises:
        RunnerLostError: some have not come in time.
    """
    end = time.monotonic() + seconds
    found: dict[int, socket.socket] = {}
    greeted: list[socket.socket] = []  # the oldest first
    lock = threading.Lock()

    def greet(connection: socket.socket) -> None:
        try:
            said = _said(connection, TOKEN_BYTES + _RANK.size, time.monotonic() + _GREETING_SECONDS)
            (rank,) = _RANK.unpack(said[TOKEN_BYTES:])
            with lock:
                if hmac.compare_digest(said[:TOKEN_BYTES], token) and 0 < rank < num_ranks and rank not in found:
                    connection.sendall(_WELCOME)
                    found[rank] = connection
                    return
        except OSError as error:
            logger.debug("a connection that is no rank's: %s", error)
        finally:
            with lock:
                if connection in greeted:
                    greeted.remove(connection)
        connection.close()

    with listening:
        listening.settimeout(0.1)
        while len(found) < num_ranks - 1:
            if time.monotonic() > end:
                missing = ", ".join(str(rank) for rank in range(1, num_ranks) if rank not in found)
                raise RunnerLostError(f"rank {missing} has not connected within {seconds:g} s")
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with lock:
                if len(greeted) == _MAX_GREETINGS:
                    with suppress(OSError):  # it has gone by itself
                        greeted.pop(0).shutdown(socket.SHUT_RDWR)
                greeted.append(connection)
            threading.Thread(target=greet, args=(connection,), daemon=True).start()
    return found


def _said(connection: socket.socket, num_bytes: int, end: float) -> bytes:
    """What a connection says, until a time by which it must have said all of it; TimeoutError then."""
    received = b""
    while len(received) < num_bytes:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received


def connect(host: str, port: int, token: bytes, rank: int, seconds: float) -> socket.socket:
    """Connect to rank 0; again, where it does not take this rank in, for others may be in the way.

    Raises:
        RunnerLostError: it has not been reached in time.
    """
    end = time.monotonic() + seconds
    while True:
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((host, port), max(end - time.monotonic(), _AGAIN_SECONDS))
            connection.sendall(token + _RANK.pack(rank))
            _said(connection, len(_WELCOME), end)
            return connection
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() + _AGAIN_SECONDS > end:
                raise RunnerLostError(f"rank {rank} cannot reach rank 0 on {host}:{port} ({error})") from error
            time.sleep(_AGAIN_SECONDS)
