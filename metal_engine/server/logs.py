"""Log output with the request's id on every line, optionally with one JSON object per line."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextvars import ContextVar
from typing import Any

# Facts about the request being served: its id, and the fields of the log line that is written at its end.
current_request: ContextVar[dict[str, Any] | None] = ContextVar("current_request", default=None)


def add_log_fields(**fields: Any) -> None:
    """Add fields to the log line that is written at the end of the current request. No effect outside a request."""
    request = current_request.get()
    if request is not None:
        request.update(fields)


class RequestIdFilter(logging.Filter):
    """Gives each record a ``request_id``: the id of the request being served, or ``-``."""

    def filter(self, record: logging.LogRecord) -> bool:
        request = current_request.get()
        if not hasattr(record, "request_id"):
            record.request_id = "-" if request is None else request["request_id"]
        return True


class JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line. The record's ``fields`` become members of the object."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", "-")
        if request_id != "-":
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class UniqueWarnings:
    """Log of warnings that has each message once. Thread-safe."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def log(self, logger: logging.Logger, message: str) -> None:
        """Log a warning, unless it has been logged before. Messages must be constants, so their number is limited."""
        with self._lock:
            is_new = message not in self._logged
            self._logged.add(message)
        if is_new:
            logger.warning(message)
