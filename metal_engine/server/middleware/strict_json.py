"""Reading JSON bodies: what Python's parser lets through and a server must not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

# Escapes and raw bytes that might make lone surrogates: rare, so that most bodies are not looked at twice.
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def loads(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON.
        HTTPException: 400, for NaN and Infinity, text that is not Unicode, numbers of thousands of digits, and
            nesting beyond what the parser can hold.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if _MAYBE_SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise _bad("is nested too deeply") from error
    except UnicodeError as error:
        raise _bad("has text that is not valid Unicode") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python converts no more than 4,300 digits
        raise _bad("has a number with too many digits") from error
    return value


def _bad(problem: str) -> HTTPException:
    # FastAPI makes a message of its own out of every other exception.
    return HTTPException(400, f"the body {problem}")


def _refuse_constant(name: str) -> Any:
    raise _bad(f"is not valid JSON: {name} is no JSON number")


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = loads(await self.body())
        return self._json


class StrictJSONRoute(APIRoute):
    """A route that reads its body with :func:`loads`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict
