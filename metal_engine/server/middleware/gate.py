"""Checks before a request reaches a route: the API key, the size of its body, and the type of its connection."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metal_engine.server.connections.connection import IS_SPARE
from metal_engine.server.errors import APIError, unavailable
from metal_engine.server.page.files import is_open
from metal_engine.server.refusal import discard_body, refuse
from metal_engine.server.status.routes import WITHOUT_KEY

# Paths that need no key, because probes and load balancers have none.
OPEN_PATHS = frozenset({"/health", "/ready"})
_NO_KEY = "No API key provided; send it as `Authorization: Bearer KEY`"
_WRONG_KEY = "Incorrect API key provided"


def require_api_key(app: ASGIApp, api_keys: Sequence[str]) -> ASGIApp:
    """Wrap ``app``: require one of the keys, as ``Authorization: Bearer`` or as ``x-api-key``.

    Other requests get status 401. Requests for ``OPEN_PATHS`` and for the page's files need no key. Sets
    ``WITHOUT_KEY`` in the scope of accepted requests: True for a request without a valid key.
    """
    # Digests have the same length, so the time of a comparison does not reveal the length of a key.
    wanted = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        sent = Headers(scope=scope)
        scheme, _, token = sent.get("authorization", "").partition(" ")
        # Anthropic's clients send x-api-key. They send both headers if they have a token and a key.
        given = [token if scheme.lower() == "bearer" else "", sent.get("x-api-key", "")]
        digests = [hashlib.sha256(key.strip().encode("latin-1", "replace")).digest() for key in given]
        # All keys are compared, so that the time does not reveal which key matched.
        has_key = sum([hmac.compare_digest(digest, one) for digest in digests for one in wanted]) > 0
        if has_key or scope["path"] in OPEN_PATHS or is_open(scope):
            scope[WITHOUT_KEY] = not has_key
            await app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer", "connection": "close"}
        error = APIError(401, _WRONG_KEY if any(given) else _NO_KEY, code="invalid_api_key", headers=headers)
        await refuse(error, scope, receive, send)

    return guarded


def only_probes_if_spare(app: ASGIApp) -> ASGIApp:
    """Wrap ``app``: reject requests over a spare connection with status 503, except requests for ``OPEN_PATHS``.

    For spare connections, see :class:`Connections`.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(IS_SPARE) and scope["path"] not in OPEN_PATHS:
            error = unavailable("too many connections (setting max-connections)", closes=True)
            await refuse(error, scope, receive, send)
            return
        await app(scope, receive, send)

    return guarded


def limit_body(app: ASGIApp, max_bytes: int, read_seconds: float) -> ASGIApp:
    """Wrap ``app``: reject bodies of more than ``max_bytes`` with status 413, without keeping them in memory.

    If no part of the body arrives for ``read_seconds``, the request gets status 408.
    """

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > max_bytes:
            await refuse(_too_large(max_bytes), scope, receive, send, read_seconds)
            return
        num_bytes = 0
        is_whole = False

        async def counting() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # the next message is the disconnect, which may come much later
                return await receive()
            try:
                async with asyncio.timeout(read_seconds):
                    message = await receive()
            except TimeoutError as error:
                raise _too_slow(read_seconds) from error
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:  # a body without Content-Length
                if message.get("more_body", False):
                    await discard_body(receive, read_seconds)
                raise _too_large(max_bytes)
            return message

        await app(scope, counting, send)

    return limited


def _too_large(max_bytes: int) -> APIError:
    message = f"the request body is larger than {max_bytes} bytes: raise --max-body-size, or reduce images"
    return APIError(413, message, headers={"connection": "close"})


def _too_slow(read_seconds: float) -> APIError:
    message = f"no part of the request body came for {read_seconds:g} s (setting timeout-read)"
    return APIError(408, message, headers={"connection": "close"})
