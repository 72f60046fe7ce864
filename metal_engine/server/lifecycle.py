"""The server's end: requests under way finish, new ones are told to go elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from metal_engine.server.errors import error_response, shutting_down
from metal_engine.server.workers import Weight, Workers

logger = logging.getLogger(__name__)

# After requests were cut: time for their last events to be written.
_LAST_WRITES_SECONDS = 1.0


class Lifecycle:
    """Counts the requests that generate, and sees them off when the server stops. Belongs to the event loop.

    Args:
        cut_requests: ends every request, now and from now on, with a message.

    Attributes:
        num_active: number of POST requests whose answer is not complete.
        num_begun: number of POST requests so far.
    """

    def __init__(self, cut_requests: Callable[[str], None], workers: Workers) -> None:
        self._cut_requests = cut_requests
        self._workers = workers
        self.num_active = self.num_begun = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.cut = False
        # Called when the server is about to end: to end streams that are no request's.
        self.at_end: list[Callable[[], None]] = []

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait for those under way; what is left at ``timeout`` is cut.

        Grammars are not waited for: their requests have not begun.
        """
        self.draining = True
        self._workers.drop(Weight.COMPILING)
        if self.num_active:
            message = "shutting down: %d requests may finish within %g s; a second signal stops at once"
            logger.warning(message, self.num_active, timeout)
        if not await self._idle_within(timeout):
            logger.warning("cut %d requests that did not finish within %g s", self.num_active, timeout)
            await self.cut_all()
        self._end()

    async def cut_all(self) -> None:
        """End every request with an error, and give the errors a moment to be written."""
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

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """``app``, with its generating requests counted, and refused once the server is stopping."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            if self.draining:
                await error_response(shutting_down(), scope)(scope, receive, send)
                return
            self.num_active += 1
            self.num_begun += 1
            self._idle.clear()
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                # A client that reads too slowly for its last event; a traceback would tell nothing.
                if not self.cut:
                    raise
            finally:
                self.num_active -= 1
                if not self.num_active:
                    self._idle.set()

        return counted
