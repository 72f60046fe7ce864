"""Connection of one client: uvicorn's HTTP/1.1 with limits on everything that a client can send or delay."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from math import inf
from typing import Any, Literal

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from metal_engine.server.connections.limits import ConnectionLimits
from metal_engine.server.connections.registry import Connections
from metal_engine.server.errors import APIError, error_response, invalid, unavailable

logger = logging.getLogger(__name__)

# Key in the ASGI scope: True for a request over a spare connection, which may only request /health and /ready.
IS_SPARE = "metal_engine.is_spare_connection"
# Seconds for which data is read and discarded after an error response, so that the client can read that response.
_LINGER_SECONDS = 2.0


class Connection(HttpToolsProtocol):
    """Connection of a client. Registered in ``connections`` from its acceptance until it is closed.

    Attributes:
        is_spare: True if the connection may only request ``/health`` and ``/ready``.
        connecting: task that sets the connection up, including the TLS handshake; None afterwards.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_spare = False
        self.connecting: asyncio.Task[None] | None = None
        self._limits = limits
        self._registry = connections
        # Part of a request that the client is sending: none, the request line with headers, or the body.
        self._phase: Literal["idle", "head", "body"] = "idle"
        self._unanswered: deque[RequestResponseCycle] = deque()  # requests whose responses are incomplete, in order
        self._num_head_bytes = 0
        # Bytes since the parser last reported the start or end of a request, a complete head, or data of a body.
        self._num_unreported_bytes = 0
        self._has_reported = False  # True if the parser reported any of these during the current call
        self._refused = False
        self._deadline = inf  # time limit for the client to send
        self._write_deadline = inf  # time limit for the client to read
        self._await_client(limits.read_seconds)

    def _await_client(self, seconds: float) -> None:
        self._deadline = self.loop.time() + (self._limits.spare_seconds if self.is_spare else seconds)

    # --- callbacks of the transport ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_client(self._limits.read_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        self._unset_keepalive_if_required()
        for cycle in self._unanswered:  # uvicorn reports the disconnect only to the last request
            _disconnect(cycle)
        super().connection_lost(exc)

    def forget(self) -> None:
        """Remove a connection that was never established.

        Its transport may have called ``connection_made``, and will not call ``connection_lost``.
        """
        self._registry.remove(self)
        self.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self._deadline == inf and not self._unanswered and self._phase == "idle":
            self._await_client(self._limits.read_seconds)  # first byte of the next request
        rest = memoryview(data)
        while rest and not self._refused:
            # Limit the bytes that the parser can buffer: it keeps a header until the header is complete.
            piece = rest[: self._limits.max_head_bytes + 1 - self._num_unreported_bytes]
            rest = rest[len(piece) :]
            self._has_reported = False
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                self._has_reported = True
                rest = memoryview(b"".join((self._strip_upgrade_header(), piece[upgrade.args[0] :], rest)))
            except httptools.HttpParserError as error:
                self._refuse(_to_api_error(error))
                return
            self._num_unreported_bytes = 0 if self._has_reported else self._num_unreported_bytes + len(piece)
            if self._num_unreported_bytes > self._limits.max_head_bytes:
                self._refuse(self._too_large())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.time() + self._limits.write_seconds

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_deadline = inf

    # --- callbacks of the parser ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = "head"
        self._num_head_bytes = 0
        self._has_reported = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == "body":  # a trailer must not count as a header of the request
            return
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) >= self._limits.max_headers:
            raise APIError(431, f"the request has more than {self._limits.max_headers} headers")
        super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_head_bytes:
            raise self._too_large()

    def _too_large(self) -> APIError:
        most = f"exceed {self._limits.max_head_bytes} bytes"
        if self._phase == "body":
            return invalid(f"chunk extensions or trailers {most}")
        return APIError(431, f"request line and headers {most}")

    def on_headers_complete(self) -> None:
        self._has_reported = True
        if self.parser.get_method() == b"CONNECT":
            raise APIError(405, "this server is not a proxy: CONNECT is not supported")
        if self.parser.should_upgrade():
            return  # the parser stops here and gets the head again without the upgrade
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise invalid("the request has more than one Host")
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise invalid(f"more than {self._limits.max_pipelined} requests were sent before their responses")
        self.scope[IS_SPARE] = self.is_spare  # type: ignore[literal-required]
        try:
            super().on_headers_complete()
        except (
            httptools.HttpParserError,
            UnicodeError,
            AttributeError,
        ) as error:  # uvicorn accepts any target as a path
            raise invalid("the request's target is not a path, or not ASCII") from error
        self._phase = "body"
        self._unanswered.append(self.cycle)
        self._deadline = inf  # the application has its own time limit for the body
        if self.is_spare:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._has_reported = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_reported = True
        if self._phase == "head":  # an upgrade request
            return
        self._phase = "idle"
        super().on_message_complete()
        if self._unanswered:
            self._registry.request_received(self)
        else:  # rest of a body whose request already has its response
            self._await_client(self._limits.keep_alive_seconds)

    def _strip_upgrade_header(self) -> bytes:
        """Return the head that the parser has just read, without the ``Upgrade`` header. Replaces the parser.

        Clients that support HTTP/2 offer it with this header, and accept a response in HTTP/1.1. The old parser would
        treat the data after the head as data of HTTP/2.
        """
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"".join((line, *headers, b"\r\n"))

    # --- responses ---

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._unanswered:
            return
        self._registry.wait_for(self)
        if self.transport.is_closing():
            self._await_client(self._limits.write_seconds)
        elif self._phase != "idle":  # rest of a body that is not needed, or the head of the next request
            self._await_client(self._limits.read_seconds)

    def _refuse(self, error: APIError) -> None:
        """Stop reading requests, respond with an error, and close the connection.

        No error is sent in two cases. If an earlier response is incomplete, the connection closes after that response.
        If the response to this request has begun, the connection closes immediately.
        """
        self._refused = True
        if len(self._unanswered) > (self._phase == "body"):
            # Responses to earlier requests come before this error, and a queue for the error alone is not worthwhile.
            # The connection therefore closes after those responses.
            if self._phase == "body":
                _disconnect(self._unanswered.pop())
                self.pipeline.popleft()  # the application has not received this request yet
            self._unanswered[-1].keep_alive = False
            return
        if self._phase == "body" and self._unanswered:
            _disconnect(self._unanswered.pop())
            if self.cycle.response_started:
                self.transport.close()
                return
        self._write(error)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.time() + _LINGER_SECONDS

    def _write(self, error: APIError) -> None:
        scope: Scope = {"path": getattr(self, "url", b"").decode("latin-1")}  # may be incomplete
        response = error_response(error, scope)
        request_id = uuid.uuid4().hex
        # The client is not authenticated. At a higher level, anyone could fill the log.
        logger.debug("refused a request: %s %s request_id=%s", error.status_code, error.message, request_id)
        added = [(b"connection", b"close"), (b"x-request-id", request_id.encode())]
        headers = [*self.server_state.default_headers, *response.raw_headers, *added]
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[error.status_code], *lines, b"\r\n", response.body)))

    # --- closing ---

    def evict(self) -> None:
        if self.transport is None:  # still in the TLS handshake
            if self.connecting is not None:
                self.connecting.cancel()
            return
        if self._phase != "idle" and not self._refused and not self.transport.is_closing():
            message = "too many connections (setting max-connections), and the rest of this request did not come"
            self._refuse(unavailable(message))
        if self.transport.get_write_buffer_size():  # a client that does not read would keep its place
            self.transport.abort()
        else:
            self.transport.close()

    def check_time(self, now: float) -> None:
        if self.transport is None:
            if now >= self._deadline and self.connecting is not None:
                self.connecting.cancel()
        elif now >= self._write_deadline:
            logger.info("closed a connection whose client did not read its answer (setting timeout-write)")
            self.transport.abort()
        elif self._deadline == inf:
            if self.transport.is_closing():
                self._await_client(self._limits.write_seconds)
        elif now >= self._deadline:
            self._on_late_client()

    def _on_late_client(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self._unanswered:  # head of the next request, while a response is being sent
            self._await_client(self._limits.read_seconds)
        elif self._refused:
            self.transport.abort()
        elif self._phase == "head":
            self._refuse(APIError(408, "request line and headers did not come in time (setting timeout-read)"))
        else:
            self._deadline = inf
            self.transport.close()


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Report to the application that the client of this request has disconnected."""
    cycle.disconnected = True
    cycle.message_event.set()


def _to_api_error(error: httptools.HttpParserError) -> APIError:
    """Return the error for a request that could not be parsed."""
    cause = error.__context__  # raised in a callback of the parser
    if isinstance(cause, APIError):
        return cause
    return invalid(f"the request is not valid HTTP/1.1: {error}")
