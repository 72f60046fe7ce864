"""Reads JSON bodies. Rejects invalid JSON that Python's parser accepts, e.g. NaN. Parses large bodies in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import aclosing
from typing import Any, cast

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from metal_engine.errors import short
from metal_engine.server import large_bodies
from metal_engine.server.errors import APIError, invalid, validated
from metal_engine.server.generation.streaming import cancel_on_disconnect
from metal_engine.server.workers import Workers

# Status that nginx uses for a client that disconnected. No client receives it, but access logs show it.
CLIENT_CLOSED_REQUEST = 499
# Values of Content-Encoding for compressed bodies. Other values, such as utf-8, have no effect.
_COMPRESSIONS = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")


def loads(body: bytes) -> Any:
    """Parse a JSON text. Call it in a thread for more than ``ALWAYS_SMALL_BYTES``.

    Raises:
        json.JSONDecodeError: the text is not valid JSON.
        APIError: status 400. The text has NaN or Infinity, invalid Unicode, a number of thousands of digits, nesting
            too deep for the parser, or more content than :mod:`metal_engine.server.large_bodies` allows.
    """
    try:
        return large_bodies.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise _bad("is nested too deeply") from error
    except large_bodies.TooComplexError as error:
        raise _bad(str(error)) from error
    except UnicodeError as error:
        raise _bad("has text that is not valid Unicode") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python converts at most 4,300 digits
        raise _bad("has a number with too many digits") from error


def _bad(problem: str) -> APIError:
    return invalid(f"the body {problem}")


def _refuse_constant(name: str) -> Any:
    raise _bad(f"is not valid JSON: {name} is not a JSON number")


def _typed(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the scope with the content type of JSON, if the request is for Ollama's API and has no ``Origin`` header.

    Ollama requires no content type: LiteLLM sends no content type, and ``curl -d`` sends the type of a form. Requests
    with an ``Origin`` header are not changed, because browsers add this header to a form for another origin.
    """
    if not scope["path"].startswith("/api/") or any(name == b"origin" for name, _ in scope["headers"]):
        return scope
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


class _StrictRequest(Request):
    """Request that reads its body with :func:`loads`.

    Args:
        model: pydantic model of the body. A large body is validated in a thread. FastAPI would validate it in the event
            loop.
    """

    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        super().__init__(_typed(request.scope), request.receive)
        self._model = model

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            # Grows as pieces arrive. Joining them at the end would need twice the memory and block the event loop.
            body = bytearray()
            async with aclosing(self.stream()) as stream:
                async for piece in stream:
                    body += piece
            self._body = cast(bytes, body)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            encoding = self.headers.get("content-encoding", "").lower()
            if encoding in _COMPRESSIONS:
                raise APIError(415, f"Content-Encoding {short(encoding)} is not supported: send the body uncompressed")
            body = await self.body()
            workers: Workers = self.app.state.workers
            self._json = await workers.run_if_large(len(body), self._validated, body)
        return self._json

    def _validated(self, body: bytes) -> Any:
        value = loads(body)
        return value if self._model is None else large_bodies.one_at_a_time(len(body), validated, self._model, value)


class StrictJSONRoute(APIRoute):
    """Route that reads its body with :func:`loads`, and cancels the endpoint's work if the client disconnects."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        wanted = None if self.body_field is None else self.body_field.field_info.annotation
        model = wanted if isinstance(wanted, type) and issubclass(wanted, BaseModel) else None

        async def strict(request: Request) -> Response:
            strict_request = _StrictRequest(request, model)
            try:
                await strict_request.body()  # afterwards, the only possible message is a disconnect
                return await cancel_on_disconnect(strict_request.receive, handler(strict_request))
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)

        return strict
