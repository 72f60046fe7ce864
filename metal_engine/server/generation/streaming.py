"""Server-sent events, and cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
# A comment: clients ignore it, and it shows proxies that the connection is alive.
KEEP_ALIVE = b": keep-alive\n\n"

_encode = json.encoder.encode_basestring_ascii


def sse(event: BaseModel) -> bytes:
    """Encode one event without a name."""
    # ASCII only: some clients end a line at U+2028, U+0085 and similar characters.
    return b"data: " + event.model_dump_json(ensure_ascii=True).encode("ascii") + b"\n\n"


def named_sse(event: Mapping[str, Any]) -> bytes:
    """Encode one event whose name is its ``type``."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode("ascii")


class ChunkTemplate:
    """Event that is sent once for each token. Everything except the text is serialized in advance.

    Args:
        event: event that has the placeholder :attr:`TEXT` in place of the text, once.
    """

    TEXT = "\u241f text \u241f"  # does not occur elsewhere in the event

    def __init__(self, event: BaseModel) -> None:
        before, _, after = sse(event).decode("ascii").partition(_encode(self.TEXT))
        assert after, "the event has no place for the text"
        self._before, self._after = before, after

    def fill(self, text: str) -> bytes:
        """Return the event with this text."""
        return (self._before + _encode(text) + self._after).encode("ascii")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, or cancel it as soon as the client disconnects.

    The request's body must have been read, so that a disconnect is the next message. All tasks have ended when this
    function returns or raises.

    Raises:
        ClientDisconnect: the client disconnected before the end of ``work``.
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
    """Response that sends events as they arrive, and closes their generator when the client disconnects.

    It also detects a disconnect between two events. Starlette's own response leaves the generator suspended when a
    write is interrupted. With newer ASGI servers, Starlette's response detects a disconnect only at the next write,
    which is too late for a request that waits in a queue.

    Args:
        keep_alive: period in seconds. After a whole period without events, a comment is sent. 0 for no comments.
        media_type: media type of the stream. Only event streams get comments.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, keep_alive: float = 0.0, media_type: str = EVENT_STREAM
    ) -> None:
        # `Response.__init__` is not called: it would set a body, and therefore a Content-Length.
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.events = events
        self._keep_alive = keep_alive if media_type == EVENT_STREAM else 0.0
        self._num_sent = 0
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await cancel_on_disconnect(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # A periodic check, so that an event does not have to reset a timer.
            keeper = asyncio.ensure_future(self._send_comments(send)) if self._keep_alive else None
            try:
                async for data in events:
                    self._num_sent += 1
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                if keeper is not None:
                    keeper.cancel()
                    await asyncio.gather(keeper, return_exceptions=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        num_sent = -1
        while True:
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            num_sent = self._num_sent
            await asyncio.sleep(self._keep_alive)
