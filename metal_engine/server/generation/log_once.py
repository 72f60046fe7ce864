"""What the log says once, however often it happens."""

from __future__ import annotations

import logging
import threading


class Notices:
    """Writes each message to the log once. Thread-safe."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def once(self, logger: logging.Logger, message: str) -> None:
        """Log a message, unless that has been done. Messages are the server's own texts: no more than there are calls
        of this method."""
        with self._lock:
            is_new = message not in self._said
            self._said.add(message)
        if is_new:
            logger.warning(message)
