"""Observes all requests: assigns an id to each, writes a log line, and counts rejected requests."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metal_engine.server.errors import ERROR_CODE
from metal_engine.server.generation.model_provider import MODEL_NAME
from metal_engine.server.logs import current_request
from metal_engine.server.status.metrics import ServerMetrics

logger = logging.getLogger(__name__)

# Format of an id from a client. Other characters could forge log lines.
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def observe(app: ASGIApp, metrics: ServerMetrics) -> ASGIApp:
    """Wrap ``app``: add ``X-Request-Id`` to each response, and write a log line for each request.

    The id is the client's own ``X-Request-Id`` if it matches ``_GIVEN_ID``, otherwise a new id. Rejected POST requests
    are counted in ``metrics``. The log level is INFO for POST, and DEBUG for other methods.
    """

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        fields: dict[str, Any] = {"request_id": request_id}
        token = current_request.set(fields)
        started = time.monotonic()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        try:
            await app(scope, receive, sending)
        finally:
            if scope["method"] == "POST":
                metrics.reject(status, scope.get(ERROR_CODE), scope.get(MODEL_NAME))
            _log(scope, status, time.monotonic() - started, fields)
            current_request.reset(token)

    return observed


def _log(scope: Scope, status: int, seconds: float, fields: dict[str, Any]) -> None:
    level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    known = {name: value for name, value in fields.items() if name != "request_id"}
    # The client chooses the path. `repr` keeps it on one line.
    path = repr(scope["path"])[1:-1]
    rest = "".join(f" {name}={value}" for name, value in known.items())
    logger.log(
        level,
        "%s %s %s in %.3f s request_id=%s%s",
        scope["method"],
        path,
        status or "cut",
        seconds,
        fields["request_id"],
        rest,
        extra={"fields": {"path": path, "status": status, "seconds": round(seconds, 6), **known}},
    )
