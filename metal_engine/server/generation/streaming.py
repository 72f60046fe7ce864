"""Server-sent events, and work that ends when its client leaves."""

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
# A comment: clients pass over it, and proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"

_encode = json.encoder.encode_basestring_ascii


def sse(event: BaseModel) -> bytes:
    """One event."""
    # ASCII only: some clients end a line at U+2028, U+0085 and the like.
    return b"data: " + event.model_dump_json(ensure_ascii=True).encode("ascii") + b"\n\n"


def named_sse(event: Mapping[str, Any]) -> bytes:
    """One event that has its ``type`` as its name too."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode("ascii")


class ChunkTemplate:
    """An event that is sent once for each token, all of it but the text serialized beforehand.

    Args:
        event: the event with :attr:`TEXT` where the text goes.
    """

    TEXT = "\u241f text \u241f"  # no JSON has it otherwise

    def __init__(self, event: BaseModel) -> None:
        before, _, after = sse(event).decode("ascii").partition(_encode(self.TEXT))
        assert after, "the event has no place for the text"
        self._before, self._after = before, after

    def fill(self, text: str) -> bytes:
        """The event with this text."""
        return (self._before + _encode(text) + self._after).encode("ascii")


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

    Args:
        keep_alive: seconds without an event after which a comment is sent; 0 for never.
        media_type: what it sends; only event streams have comments.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, keep_alive: float = 0.0, media_type: str = EVENT_STREAM
    ) -> None:
        # Without a body: `Response` would announce its length.
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
            # Looks now and then, so that tokens need not reset a timer each.
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
