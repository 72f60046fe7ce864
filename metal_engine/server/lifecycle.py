"""Shutdown of the server: requests in flight may finish, and new POST requests are rejected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from metal_engine.server.errors import shutting_down
from metal_engine.server.refusal import refuse
from metal_engine.server.workers import Weight, Workers

logger = logging.getLogger(__name__)

# Seconds in which aborted requests can write their last events.
_LAST_WRITES_SECONDS = 1.0


class Lifecycle:
    """Counts requests, and drains them when the server stops. Must be used in the event loop's thread.

    Counts POST requests, and the other requests that use :meth:`in_flight`.

    Args:
        cut_requests: function that ends every current and future request with a message.

    Attributes:
        num_active: number of counted requests whose response is incomplete.
        num_begun: number of counted requests so far.
        draining: True once the server rejects new POST requests.
        cut: True once all requests have been aborted.
        at_drain: functions to call when the server begins to drain. They end work that no client waits for.
        at_end: functions to call when the server is about to end. They end streams of requests that are not counted.
            They may be called several times.
    """

    def __init__(self, cut_requests: Callable[[str], None], workers: Workers) -> None:
        self._cut_requests = cut_requests
        self._workers = workers
        self.num_active = self.num_begun = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.cut = False
        self.at_drain: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []

    async def drain(self, timeout: float) -> None:
        """Reject new POST requests, and wait for the requests in flight. After ``timeout`` seconds, abort the rest.

        Requests that wait for a grammar or for their images get an error at once. The engine has not begun them.
        """
        self.draining = True
        for end in self.at_drain:
            end()
        self._workers.drop(Weight.COMPILING)
        self._workers.drop(Weight.IMAGES)
        if self.num_active:
            message = "shutting down: %d requests may finish within %g s; a second signal stops at once"
            logger.warning(message, self.num_active, timeout)
        if not await self._idle_within(timeout):
            logger.warning("cut %d requests that did not finish within %g s", self.num_active, timeout)
            await self.cut_all()
        self._end()

    async def cut_all(self) -> None:
        """End every request with an error. Wait up to ``_LAST_WRITES_SECONDS`` until the errors are written."""
        self.draining = self.cut = True
        self._cut_requests("the server is shutting down")
        self._end()
        await self._idle_within(_LAST_WRITES_SECONDS)

    def _end(self) -> None:
        for end in self.at_end:
            end()

    async def _idle_within(self, timeout: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return self._idle.is_set()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Within this context, count a request. :meth:`drain` waits for its end."""
        self.num_active += 1
        self.num_begun += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Wrap ``app``: count its POST requests, and reject them with status 503 once the server is stopping."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            if self.draining:
                await refuse(shutting_down(), scope, receive, send)
                return
            with self.in_flight():
                try:
                    await app(scope, receive, send)
                except asyncio.CancelledError:
                    # The client reads too slowly to get its last event. A traceback would not help.
                    if not self.cut:
                        raise

        return counted
