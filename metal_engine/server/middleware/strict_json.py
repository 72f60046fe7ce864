"""Reading JSON bodies: what Python's parser lets through and a server must not, and what is too large for the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from metal_engine.server import large_bodies
from metal_engine.server.errors import APIError, invalid, validated


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


T = TypeVar("T")


async def off_loop_if_large(request: Request, work: Callable[..., T], *args: Any) -> T:
    """``work(*args)``, which takes longer the larger the body is: in a thread for a large one."""
    if large_bodies.is_large(await request.body()):
        return await asyncio.to_thread(work, *args)
    return work(*args)


class _StrictRequest(Request):
    """A request that reads its body with :func:`loads`.

    Args:
        model: what the body must be. FastAPI would validate it in the event loop, so it is made one before.
    """

    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await off_loop_if_large(self, self._validated, await self.body())
        return self._json

    def _validated(self, body: bytes) -> Any:
        value = loads(body)
        return value if self._model is None else validated(self._model, value)


class StrictJSONRoute(APIRoute):
    """A route that reads its body with :func:`loads`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        wanted = None if self.body_field is None else self.body_field.field_info.annotation
        model = wanted if isinstance(wanted, type) and issubclass(wanted, BaseModel) else None

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request, model))

        return strict
