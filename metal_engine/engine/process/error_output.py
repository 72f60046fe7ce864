"""Copies the standard error of an engine's process, and keeps its last lines to explain the end of the process."""

from __future__ import annotations

import fcntl
import os
import re
import termios
import threading
import time
from collections import deque
from contextlib import suppress

_STDERR = 2
_READ_BYTES = 1 << 16
# Lines of the process that count as its last words: their maximum number, length in bytes, and age in seconds when
# `last_words` is called.
_MAX_LINES, _MAX_CHARACTERS, _MAX_AGE = 3, 300, 5.0
_MAX_REMEMBERED = 200
# Prefixes of the line at which Python's dump of all threads begins.
_DUMPS = ("Thread 0x", "Current thread 0x")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\x20-\x7e\x80-\U0010ffff]")


class ErrorOutput:
    """Copies the standard error of an engine's process to the standard error of this process.

    If the standard error of this process is a terminal, the engine's process gets a terminal of the same size.

    Attributes:
        descriptor: descriptor that the engine's process inherits as its standard error. :meth:`start` closes it in this
            process.
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=_MAX_REMEMBERED)
        is_terminal = os.isatty(_STDERR)
        self._source, self.descriptor = os.openpty() if is_terminal else os.pipe()
        if is_terminal:
            size = fcntl.ioctl(_STDERR, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)
        self._thread = threading.Thread(target=self._copy, name="engine-stderr", daemon=True)

    def start(self) -> None:
        """Close :attr:`descriptor` in this process, and start the thread that copies the engine's output to stderr."""
        os.close(self.descriptor)
        self._thread.start()

    def _copy(self) -> None:
        rest = b""
        with suppress(OSError):  # the end of a terminal
            while data := os.read(self._source, _READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-_MAX_CHARACTERS:]
                self._remember(*lines[-_MAX_REMEMBERED:])
                with suppress(OSError):  # a full disk must not stop the process
                    while data:
                        data = data[os.write(_STDERR, data) :]
        self._remember(rest)
        os.close(self._source)

    def _remember(self, *lines: bytes) -> None:
        now = time.monotonic()
        for line in lines:
            text = _TERMINAL_CODES.sub("", line[:_MAX_CHARACTERS].decode("utf-8", "replace")).strip()
            if text:
                self._lines.append((now, text))

    def wait(self) -> None:
        """Wait up to a second until everything is copied. Call it after the end of the process."""
        self._thread.join(1.0)  # a child of the engine's process may have inherited the descriptor

    def last_words(self) -> str:
        """Return the last lines that an ended process has written, joined by `` | ``; an empty text without lines.

        The lines are at most three, and from the last five seconds. A dump of the stacks of threads is left out.
        """
        since = time.monotonic() - _MAX_AGE
        words = [line for at, line in list(self._lines) if at > since]
        dump = next((i for i, line in enumerate(words) if line.startswith(_DUMPS)), len(words))
        return " | ".join(words[:dump][-_MAX_LINES:])
