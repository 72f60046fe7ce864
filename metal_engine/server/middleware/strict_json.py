"""Reading JSON bodies: what Python's parser lets through and a server must not, and what is too large for the loop."""

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

from metal_engine.server import large_bodies
from metal_engine.server.errors import APIError, invalid, validated
from metal_engine.server.generation.streaming import cancel_on_disconnect
from metal_engine.server.workers import Weight, Workers

# nginx's status for a client that left; nobody receives it, but access logs show it.
CLIENT_CLOSED_REQUEST = 499


def loads(body: bytes) -> Any:
    """The value of a JSON text; for a large one (:func:`large_bodies.is_large`), to be called in a thread.

    Raises:
        json.JSONDecodeError: it is no JSON.
        APIError: 400, for NaN and Infinity, text that is not Unicode, numbers of thousands of digits, nesting
            beyond what the parser can hold, and more arrays and objects than any request needs.
    """
    parse = large_bodies.loads if large_bodies.is_large(body) else json.loads
    try:
        value = parse(body, parse_constant=_refuse_constant)
        large_bodies.check_unicode(body, value)
    except RecursionError as error:
        raise _bad("is nested too deeply") from error
    except large_bodies.TooComplexError as error:
        raise _bad(str(error)) from error
    except UnicodeError as error:
        raise _bad("has text that is not valid Unicode") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python converts no more than 4,300 digits
        raise _bad("has a number with too many digits") from error
    return value


def _bad(problem: str) -> APIError:
    return invalid(f"the body {problem}")


def _refuse_constant(name: str) -> Any:
    raise _bad(f"is not valid JSON: {name} is no JSON number")


def _typed(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A request to Ollama's API with a JSON type, whatever it has: Ollama asks for none, LiteLLM sends none, and
    ``curl -d`` a form's.

    A browser can send a body of no type, or a form's, across origins, but not without its ``Origin``.
    """
    if not scope["path"].startswith("/api/") or any(name == b"origin" for name, _ in scope["headers"]):
        return scope
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


class _StrictRequest(Request):
    """A request that reads its body with :func:`loads`.

    Args:
        model: what the body must be. FastAPI would validate it in the event loop, so it is made one before.
    """

    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        super().__init__(_typed(request.scope), request.receive)
        self._model = model

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            # Grows as pieces come: joined in the end, they would be there twice, and the join would hold the loop.
            body = bytearray()
            async with aclosing(self.stream()) as stream:
                async for piece in stream:
                    body += piece
            self._body = cast(bytes, body)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            if large_bodies.is_large(body):
                workers: Workers = self.app.state.workers
                self._json = await workers.run(Weight.of(len(body)), self._validated, body)
            else:
                self._json = self._validated(body)
        return self._json

    def _validated(self, body: bytes) -> Any:
        value = loads(body)
        return value if self._model is None else validated(self._model, value)


class StrictJSONRoute(APIRoute):
    """A route that reads its body with :func:`loads`, and ends when the client leaves before there is an answer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        wanted = None if self.body_field is None else self.body_field.field_info.annotation
        model = wanted if isinstance(wanted, type) and issubclass(wanted, BaseModel) else None

        async def strict(request: Request) -> Response:
            strict_request = _StrictRequest(request, model)
            try:
                await strict_request.body()  # after which there is nothing to receive but that the client has left
                return await cancel_on_disconnect(strict_request.receive, handler(strict_request))
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)

        return strict
