"""TCP connections between rank 0 and the other ranks, for plans, heartbeats and failures. Arrays go through MLX.

A frame has a length (4 bytes, big-endian), a :class:`FrameKind` (1 byte), and its content. A rank without work sleeps
in ``recv``. A separate thread sends heartbeats, so a rank that loads or computes for long is not silent. A rank is
silent only if its whole process hangs or sleeps, or its connection is cut.
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

# Maximum size of a frame in bytes. A plan with 256 new prompts of 100,000 tokens has 180 MiB.
MAX_FRAME = 1 << 28
TOKEN_BYTES = 16
_HEADER = struct.Struct(">IB")
HEADER_BYTES = _HEADER.size
_RANK = struct.Struct(">I")
_PROGRESS = struct.Struct(">Q")
# Heartbeats sent during the timeout after which a rank counts as lost, and maximum seconds between two heartbeats.
_BEATS, _MAX_BEAT_SECONDS = 5, 2.0
# Number of parts in which a timeout is counted. If a wait for one part takes this many seconds longer than the part,
# this process was stopped.
_SLICES, _STALL_SECONDS = 10, 1.0
# Seconds within which a connection must identify itself, and maximum number of unidentified connections.
_GREETING_SECONDS = 5.0
_MAX_GREETINGS = 64
# Byte that rank 0 sends to a rank that it accepts, and seconds that a rank waits before it connects again.
_WELCOME = b"\x01"
_RETRY_SECONDS = 0.2


class FrameKind(IntEnum):
    """Kind of a frame."""

    BEAT = 0  # heartbeat, with the progress of its sender
    PLAN = 1  # start a step
    FINISH = 2  # finish the oldest step in flight
    DROP = 3  # drop requests, after rank 0 has refused a plan
    FIGURES = 4  # values of one rank, or of all ranks (`RankGroup.exchange`)
    LOST = 5  # a rank was lost or has failed; all ranks end
    QUIT = 6  # rank 0 ends normally


class Link:
    """Connection to another rank.

    Args:
        connection: connected socket.
        name: name of the other rank in messages.
        timeout: seconds of silence after which the other rank counts as lost.
        on_lost: callback for the loss of a rank, called with the reason. It runs in the thread that has found the loss:
            a thread of this link, or the caller of :meth:`send`.

    Attributes:
        progress: number of steps that this rank has started, plus the number of steps that it has finished. Sent in
            heartbeats. Always 0 on rank 0, whose count is in
            :class:`metal_engine.distributed.rank_failure.StepTimeout`.
        their_progress: ``progress`` in the other rank's last heartbeat.
    """

    def __init__(self, connection: socket.socket, name: str, timeout: float, on_lost: Callable[[str], None]) -> None:
        self.name = name
        self.progress = self.their_progress = 0
        self._connection = connection
        self._timeout = timeout
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._is_closing = False
        self._inbox: queue.SimpleQueue[tuple[FrameKind, bytes]] = queue.SimpleQueue()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # This timeout is for sending only: reading has its own timeout.
        connection.settimeout(timeout)

    def start(self) -> None:
        """Start the threads that read frames and send heartbeats."""
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"link to {self.name}", daemon=True).start()

    def send(self, kind: FrameKind, content: bytes = b"") -> None:
        """Send a frame. Thread-safe. Blocks up to ``timeout`` seconds while the other rank reads nothing.

        Raises:
            RunnerLostError: the other rank is gone. ``on_lost`` has been called, unless :meth:`close` was called.
        """
        try:
            with self._lock:
                self._connection.sendall(_HEADER.pack(len(content), kind) + content)
        except OSError as error:
            message = self._describe(error)
            self._lose(message)
            raise RunnerLostError(message) from error

    def receive(self, seconds: float | None = None) -> tuple[FrameKind, bytes]:
        """Wait for the next frame other than heartbeats and reports of a loss. Return its kind and content.

        After :meth:`wake`, returns an empty frame of kind LOST.

        Args:
            seconds: time limit; None to wait without a limit.

        Raises:
            TimeoutError: no frame has arrived within ``seconds``.
        """
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None

    def wake(self) -> None:
        """Wake a waiting :meth:`receive`, so that its caller checks for a loss."""
        self._inbox.put((FrameKind.LOST, b""))

    def close(self) -> None:
        """Stop sending heartbeats, and stop treating silence or the end of the connection as a loss of the other rank.

        The connection stays open. A frame of kind LOST is still passed to ``on_lost``.
        """
        self._is_closing = True

    def _lose(self, message: str) -> None:
        if not self._is_closing:
            self._on_lost(message)

    def _describe(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"{self.name} has been silent for {self._timeout:g} s"
        return f"{self.name} has gone ({error.strerror or error})"

    def _read(self) -> None:
        while True:
            try:
                kind, content = read_frame(self._connection, self._timeout)
            except OSError as error:
                self._lose(self._describe(error))
                return
            except ValueError as error:
                self._lose(f"{self.name} sends {error}")
                return
            if kind is FrameKind.BEAT:
                (self.their_progress,) = _PROGRESS.unpack(content)
            elif kind is FrameKind.LOST:
                self._on_lost(content.decode(errors="replace"))
            elif kind is FrameKind.QUIT:
                self._is_closing = True
                self._inbox.put((kind, content))
            else:
                self._inbox.put((kind, content))

    def _beat(self) -> None:
        pause = min(self._timeout / _BEATS, _MAX_BEAT_SECONDS)
        while not self._is_closing:
            time.sleep(pause)
            try:
                self.send(FrameKind.BEAT, _PROGRESS.pack(self.progress))
            except RunnerLostError:
                return


def read_frame(connection: socket.socket, timeout: float) -> tuple[FrameKind, bytes]:
    """Wait for a frame, heartbeats included. Return its kind and content.

    Raises:
        OSError: the peer is gone, or silent for longer than ``timeout`` seconds.
        ValueError: the received data is not a frame.
    """
    length, kind = _HEADER.unpack(_exactly(connection, _HEADER.size, timeout))
    if length > MAX_FRAME or kind not in list(FrameKind) or (kind == FrameKind.BEAT and length != _PROGRESS.size):
        raise ValueError(f"an invalid frame (kind {kind}, {length} bytes)")
    return FrameKind(kind), _exactly(connection, length, timeout)


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
    """Wait until data can be read. Raises TimeoutError after ``timeout`` seconds of silence.

    If this process itself was stopped in the meantime, the ``timeout`` starts again.
    """
    part = timeout / _SLICES
    num_silent = 0
    poll = select.poll()  # select.select() supports only file descriptors below 1,024
    poll.register(connection, select.POLLIN)
    while num_silent < _SLICES:
        start = time.monotonic()
        if poll.poll(part * 1000):
            return
        num_silent = 0 if time.monotonic() - start > part + _STALL_SECONDS else num_silent + 1
    raise TimeoutError


# --- rendezvous ---


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of ``host``, rank 0's address in the group. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family)  # a link-local IPv6 address contains a scope


def accept_ranks(listening: socket.socket, token: bytes, num_ranks: int, seconds: float) -> dict[int, socket.socket]:
    """Wait for the connections of ranks 1 to ``num_ranks - 1``. Return the connections by rank. Closes ``listening``.

    A connection that does not send the right token within ``_GREETING_SECONDS`` is closed. At most ``_MAX_GREETINGS``
    connections may be without a token. A further connection closes the oldest of them.

    Args:
        token: secret of ``TOKEN_BYTES`` bytes that each rank sends first.
        num_ranks: number of ranks, including rank 0.
        seconds: time limit for all connections together.

    Raises:
        RunnerLostError: some ranks have not connected in time.
    """
    end = time.monotonic() + seconds
    found: dict[int, socket.socket] = {}
    greeted: list[socket.socket] = []  # unidentified connections, oldest first
    lock = threading.Lock()

    def greet(connection: socket.socket) -> None:
        try:
            received = _receive_by(connection, TOKEN_BYTES + _RANK.size, time.monotonic() + _GREETING_SECONDS)
            (rank,) = _RANK.unpack(received[TOKEN_BYTES:])
            with lock:
                if hmac.compare_digest(received[:TOKEN_BYTES], token) and 0 < rank < num_ranks and rank not in found:
                    connection.sendall(_WELCOME)
                    found[rank] = connection
                    return
        except OSError as error:
            logger.debug("refused a connection that does not belong to a rank: %s", error)
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
            except (TimeoutError, ConnectionError):  # no connection, or the peer has closed it already
                continue
            with lock:
                if len(greeted) == _MAX_GREETINGS:
                    with suppress(OSError):  # the peer has closed it already
                        greeted.pop(0).shutdown(socket.SHUT_RDWR)
                greeted.append(connection)
            threading.Thread(target=greet, args=(connection,), daemon=True).start()
    return found


def _receive_by(connection: socket.socket, num_bytes: int, end: float) -> bytes:
    """Receive ``num_bytes`` bytes. Raises TimeoutError if they have not arrived by ``end``."""
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
    """Connect to rank 0, and return the connection once rank 0 has accepted ``token``.

    Retries after any error, because rank 0 may close a connection before it has read the token
    (:func:`accept_ranks`).

    Raises:
        RunnerLostError: rank 0 was not reached in time.
    """
    end = time.monotonic() + seconds
    while True:
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((host, port), max(end - time.monotonic(), _RETRY_SECONDS))
            connection.sendall(token + _RANK.pack(rank))
            _receive_by(connection, len(_WELCOME), end)
            return connection
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() + _RETRY_SECONDS > end:
                raise RunnerLostError(f"rank {rank} cannot reach rank 0 on {host}:{port} ({error})") from error
            time.sleep(_RETRY_SECONDS)
