"""Log messages that are written only once, however often their cause occurs."""

from __future__ import annotations

import logging
import threading


class Notices:
    """Writes each message to the log once. Thread-safe."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def once(self, logger: logging.Logger, message: str) -> None:
        """Log a message, unless it has been logged before. Messages must be constants, so their number is limited."""
        with self._lock:
            is_new = message not in self._said
            self._said.add(message)
        if is_new:
            logger.warning(message)
