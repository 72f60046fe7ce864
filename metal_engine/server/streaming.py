"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from metal_engine.server.errors import APIError, to_api_error
from metal_engine.server.generation import Endpoint, Generation

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def sse(event: BaseModel) -> bytes:
    """One event."""
    # ASCII only: some clients end a line at U+2028, U+0085 and the like.
    return b"data: " + event.model_dump_json(ensure_ascii=True).encode("ascii") + b"\n\n"


async def stream_events(
    generation: Generation, endpoint: Endpoint[Any], include_usage: bool, continuous_usage: bool = False
) -> AsyncGenerator[bytes, None]:
    """A generation as server-sent events: one item, so one write, for whatever came at once.

    An error becomes the last event; without ``[DONE]`` after it, so that it is not taken for a normal end.
    """
    started: set[int] = set()
    try:
        async with aclosing(generation.outputs()) as batches:
            async for batch in batches:
                data = b""
                for index, output in batch:
                    chunks = endpoint.chunks(generation, index, output, first=index not in started)
                    started.add(index)
                    if continuous_usage:
                        chunks = [chunk.model_copy(update={"usage": generation.usage}) for chunk in chunks]
                    data += b"".join(map(sse, chunks))
                if data:
                    yield data
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("request %s failed", generation.request_id)
        yield sse(to_api_error(error).body)
        return
    yield (sse(endpoint.usage_chunk(generation)) if include_usage else b"") + DONE


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, or cancel it as soon as the client disconnects.

    The request's body must have been read, so that a disconnect is the next thing to receive. No task is left
    behind, however this ends.

    Raises:
        ClientDisconnect: the client left first.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnect
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Sends events as they come; closes their generator when the client leaves, even between two events.

    Starlette's own response leaves the generator suspended when a write is interrupted, and with newer ASGI
    servers notices a disconnect only at the next write: too late for a request that waits in a queue.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # Without a body: `Response` would announce its length.
        self.status_code = 200
        self.background = None
        self.events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await cancel_on_disconnect(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
