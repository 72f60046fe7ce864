"""Responds to a request whose body is not read: sends the error, then waits for the rest of the body."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from metal_engine.server.errors import APIError, error_response


async def refuse(error: APIError, scope: Scope, receive: Receive, send: Send, seconds: float = 2.0) -> None:
    """Send an error, and discard the rest of the body for at most ``seconds``.

    ``error`` must have the header ``connection: close``. If the connection were closed before the client has sent its
    body, later data would reset the connection. Some clients would then see the reset instead of the response.
    """
    response = error_response(error, scope)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
    # With an Expect header, the client waits for the response before it sends the body.
    if "expect" not in Headers(scope=scope):
        await discard_body(receive, seconds)
    await send({"type": "http.response.body", "body": b""})


async def discard_body(receive: Receive, seconds: float) -> None:
    """Read and discard the rest of a body for at most ``seconds``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while (await receive()).get("more_body", False):
                pass
