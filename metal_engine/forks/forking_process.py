"""Parent side of a process that forks itself for each piece of work."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence

from metal_engine.cancellation import check_cancelled
from metal_engine.forks.channel import BUFFER_BYTES, LENGTH, framed
from metal_engine.python_process import start_python

# Interval at which a waiting request checks for cancellation.
_POLL_MILLISECONDS = 20
# Maximum wait for an answer in seconds. An answer takes at most a few seconds of CPU time, but the machine may be very
# busy.
_WAIT_SECONDS = 60.0


class ForkError(Exception):
    """The forking process cannot be started. The message gives the reason."""


def receive_patiently(channel: socket.socket, *, is_shared: bool = False) -> bytearray | None:
    """Receive the next message. Return None if the peer closes the socket or takes longer than ``_WAIT_SECONDS``.

    Args:
        is_shared: True if several requests wait for the message. Cancellation of the current request is then ignored.

    Raises:
        Cancelled: the request was cancelled, and ``is_shared`` is False.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    length = bytearray(LENGTH.size)
    if not _fill(memoryview(length), channel, deadline, is_shared):
        return None
    message = bytearray(LENGTH.unpack(length)[0])
    return message if _fill(memoryview(message), channel, deadline, is_shared) else None


def receive_into(view: memoryview, channel: socket.socket) -> bool:
    """Receive the next message into ``view``, and return True.

    Returns False if the message does not have the size of ``view``, or if :func:`receive_patiently` would return None.
    Close the socket in these cases: a part of the message may be unread. Raises Cancelled if the request was cancelled.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    length = bytearray(LENGTH.size)
    if not _fill(memoryview(length), channel, deadline, False) or LENGTH.unpack(length)[0] != view.nbytes:
        return False
    return _fill(view, channel, deadline, False)


def _fill(view: memoryview, channel: socket.socket, deadline: float, is_shared: bool) -> bool:
    """Receive bytes until ``view`` is full. Return False if either side closes the socket, or after ``deadline``.

    Raises Cancelled if the request was cancelled, unless ``is_shared``.
    """
    num_received = 0
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while num_received < view.nbytes:
        if not is_shared:
            check_cancelled()
        try:
            if not poll.poll(_POLL_MILLISECONDS):
                if time.monotonic() > deadline:
                    return False
                continue
            num_new = channel.recv_into(view[num_received:])
        except (OSError, ValueError):  # closed by another thread
            return False
        if not num_new:
            return False
        num_received += num_new
    return True


class ForkingProcess:
    """Process that prepares expensive state once, and forks for each socket that it receives. Thread-safe.

    :meth:`connect` starts the process if it is not running.

    Args:
        module: module to run with ``python -m``. It calls :func:`metal_engine.forks.serving.serve_forks`.
        messages: first messages to the process. The process sends a single answer to these messages: an empty message
            if it is ready, otherwise the reason of the failure.
    """

    def __init__(self, module: str, messages: Sequence[bytes]) -> None:
        self._module = module
        self._messages = messages
        self._control: socket.socket | None = None
        self._end: weakref.finalize | None = None
        self._lock = threading.Lock()

    def connect(self) -> socket.socket:
        """Return a socket to a new fork, which waits for its first message. Starts the process if necessary.

        Starting can take up to ``_WAIT_SECONDS``. Meanwhile, other threads wait for the start, too.

        Raises:
            ForkError: the process cannot be started.
        """
        ours, theirs = _socket_pair()
        with theirs, self._lock:
            try:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                if self._control is None or not self._hand_over(self._control, theirs):
                    self._start()
                    assert self._control is not None
                    if not self._hand_over(self._control, theirs):
                        raise ForkError("the process ended at once")
            except BaseException:
                ours.close()
                raise
        return ours

    def _hand_over(self, control: socket.socket, theirs: socket.socket) -> bool:
        """Send the fork's end of a socket pair to the forking process. Return False if the process has ended.

        Wait until the process has received the socket. If this process closed the socket earlier, macOS could close it
        in both processes.
        """
        try:
            socket.send_fds(control, [b"f"], [theirs.fileno()])
        except OSError:
            return False
        return _fill(memoryview(bytearray(1)), control, time.monotonic() + _WAIT_SECONDS, is_shared=True)

    def _start(self) -> None:
        self.close()
        ours, theirs = _socket_pair()
        try:
            with theirs:
                # Starts a new interpreter: a fork would inherit the locks of other threads, and MLX.
                process = start_python(self._module, theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except (OSError, ValueError, TypeError) as error:
            ours.close()
            raise ForkError(str(error)) from error
        assert process.stderr is not None
        with process.stderr as stderr:
            self._end = end = weakref.finalize(self, _end_process, ours, process)
            with contextlib.suppress(OSError):  # if the process has ended, the answer below is None
                ours.sendall(b"".join(map(framed, self._messages)))
            answer = receive_patiently(ours, is_shared=True)
            if answer != b"":
                end()
                last_line = stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
                reason = answer.decode() if answer else last_line or f"it ended with status {process.returncode}"
                raise ForkError(reason)
        self._control = ours

    def close(self) -> None:
        """End the process. A :meth:`connect` that waits for its start fails.

        Forks continue until their sockets are closed.
        """
        end, self._control = self._end, None
        if end is not None:
            end()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets. Raises ForkError if this process has too many open files."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise ForkError(str(error)) from error


def _end_process(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    process.kill()  # before closing the socket: another thread that reads it then sees its end
    process.wait()
    control.close()
