"""The process that has loaded the tokenizer, as the engine sees it: started when the first grammar comes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

from metal_engine.cancellation import check_cancelled
from metal_engine.grammars.messages import BUFFER_BYTES, LENGTH, framed

_MODULE = "metal_engine.grammars.process"
# How often somebody who waits looks whether its asker has left.
_POLL_MILLISECONDS = 20
# For what is bounded in CPU time, on a machine that is very busy.
_WAIT_SECONDS = 60.0


class GrammarProcessError(Exception):
    """A process that is needed for grammars cannot be started."""


def receive_patiently(channel: socket.socket, *, is_shared: bool = False) -> bytes | None:
    """The next message; None if the other end has gone or does not answer.

    Args:
        is_shared: others wait for it too.

    Raises:
        Cancelled: whoever asked for it has left, unless it is shared.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    message = bytearray()
    size = LENGTH.size
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while len(message) < size:
        if not is_shared:
            check_cancelled()
        try:
            if not poll.poll(_POLL_MILLISECONDS):
                if time.monotonic() > deadline:
                    return None
                continue
            part = channel.recv(size - len(message))
        except (OSError, ValueError):  # closed, by another thread
            return None
        if not part:
            return None
        message += part
        if len(message) == LENGTH.size:
            size = LENGTH.size + LENGTH.unpack(message)[0]
    return bytes(message[LENGTH.size :])


class TokenizerProcess:
    """Starts a process for each grammar, all of them forks of one that has loaded the tokenizer. Thread-safe.

    Args:
        tokenizer_json: the tokenizer as Hugging Face's library writes it.
        vocab_size: number of logits.
        eos_token_ids: end-of-sequence ids below that.
    """

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._options = json.dumps({"n_vocab": vocab_size, "eos_token": list(eos_token_ids)}).encode()
        self._control: socket.socket | None = None
        self._end: weakref.finalize | None = None
        self._lock = threading.Lock()

    def connect(self) -> socket.socket:
        """Returns a socket to a new process, which waits for its grammar.

        Raises:
            GrammarProcessError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                if self._control is None or not self._hand_over(self._control, theirs):
                    self._start()
                    assert self._control is not None
                    if not self._hand_over(self._control, theirs):
                        raise GrammarProcessError("it ended at once")
            except BaseException:
                ours.close()
                raise
        return ours

    def _hand_over(self, control: socket.socket, theirs: socket.socket) -> bool:
        """Have a process forked for a socket. Returns False if there is nobody to do it."""
        try:
            socket.send_fds(control, [b"f"], [theirs.fileno()])
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            with theirs:
                # The whole interpreter is started anew: a fork would have our threads' locks, and MLX.
                process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # an interrupt from the terminal is ours
                )
        except (OSError, ValueError, TypeError) as error:
            ours.close()
            raise GrammarProcessError(str(error)) from error
        assert process.stderr is not None
        with process.stderr as stderr:
            self._end = end = weakref.finalize(self, _end_process, ours, process)
            with contextlib.suppress(OSError):  # if it has ended, there is no answer either
                ours.sendall(framed(self._options) + framed(self._tokenizer_json))
            answer = receive_patiently(ours, is_shared=True)
            if answer != b"":
                end()
                last_line = stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
                reason = answer.decode() if answer else last_line or f"it ended with status {process.returncode}"
                raise GrammarProcessError(reason)
        self._control = ours

    def close(self) -> None:
        """End the process, and whoever waits for it. Those of single grammars end when nobody uses them any more."""
        end, self._control = self._end, None
        if end is not None:
            end()


def _end_process(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    process.kill()  # before the socket, which another thread may be reading: it meets the end
    process.wait()
    control.close()
