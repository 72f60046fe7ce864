"""Standard error of an engine's process: copied to this process's, and remembered for the reason of its end."""

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
# Lines of the process that count as its last words: their maximum number, length and age in seconds at its end.
_MAX_LINES, _MAX_CHARACTERS, _MAX_AGE = 3, 300, 5.0
_MAX_REMEMBERED = 200
# Beginnings of lines at which Python's dump of all threads begins.
_DUMPS = ("Thread 0x", "Current thread 0x")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\x20-\x7e\x80-\U0010ffff]")


class ErrorOutput:
    """Copy of a process's standard error. If this process's is a terminal, so is the process's.

    Attributes:
        descriptor: descriptor for the process. Close it with :meth:`start` when the process has inherited it.
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
        """Start to copy."""
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
        """Wait until everything is copied, after the end of the process."""
        self._thread.join(1.0)  # a process of the process may have inherited the descriptor

    def last_words(self) -> str:
        """Return the last lines of a process that has ended, joined to one line; empty without lines."""
        since = time.monotonic() - _MAX_AGE
        words = [line for at, line in list(self._lines) if at > since]
        dump = next((i for i, line in enumerate(words) if line.startswith(_DUMPS)), len(words))
        return " | ".join(words[:dump][-_MAX_LINES:])
