"""Logs that machines read: the id of the request on every line, one JSON object a line where asked for."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

# What is known of the request that is being served: its id, and what the line about its end tells.
current_request: ContextVar[dict[str, Any] | None] = ContextVar("current_request", default=None)


def note(**facts: Any) -> None:
    """Add to what the log will tell about the request that is being served."""
    request = current_request.get()
    if request is not None:
        request.update(facts)


class RequestIdFilter(logging.Filter):
    """Gives each record a ``request_id``: that of the request being served, or ``-``."""

    def filter(self, record: logging.LogRecord) -> bool:
        request = current_request.get()
        if not hasattr(record, "request_id"):
            record.request_id = "-" if request is None else request["request_id"]
        return True


class JSONFormatter(logging.Formatter):
    """A record as one JSON object on one line; a record's ``facts`` become members of it."""

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
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
