"""Raw HTTP requests, valid and malformed, with the statuses that a server may return for each."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.serving import DEADLINE

BODY = b'{"prompt": "abc", "max_tokens": 2}'
JSON = b"Content-Type: application/json\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def get(target: bytes = b"/health", headers: bytes = b"", version: bytes = b"HTTP/1.1") -> bytes:
    """Return a GET request."""
    return b"GET " + target + b" " + version + b"\r\nHost: localhost\r\n" + headers + b"\r\n"


def post(headers: bytes = b"", body: bytes = BODY, *, length: bytes | None = None, host: bytes = b"localhost") -> bytes:
    """Return a completion request. ``length`` replaces the correct Content-Length; an empty value omits the header."""
    said = b"%d" % len(body) if length is None else length
    announced = b"Content-Length: " + said + b"\r\n" if said else b""
    return b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b"\r\n" + JSON + headers + announced + b"\r\n" + body


def chunked(chunks: bytes, headers: bytes = b"") -> bytes:
    """Return a completion request with a chunked body."""
    return post(b"Transfer-Encoding: chunked\r\n" + headers, chunks, length=b"")


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x" % len(data) + extension + b"\r\n" + data + b"\r\n"


@dataclass(frozen=True)
class Shape:
    """Bytes to send, and the allowed statuses of the responses in order.

    Attributes:
        statuses: set of allowed statuses for each response; empty if the bytes contain no request.
        at_any_pace: False if the responses depend on whether an earlier response is in flight when more bytes arrive.
    """

    name: str
    data: bytes
    statuses: tuple[frozenset[int], ...]
    at_any_pace: bool = True


def shape(name: str, data: bytes, *statuses: int | tuple[int, ...], at_any_pace: bool = True) -> Shape:
    sets = tuple(frozenset((s,) if isinstance(s, int) else s) for s in statuses)
    return Shape(name, data, sets, at_any_pace)


END = b"0\r\n\r\n"
WHOLE = chunk(BODY) + END
SHAPES = [
    shape("a request", get(), 200),
    shape("a completion", post(), 200),
    shape("HTTP/1.0", get(version=b"HTTP/1.0"), 200),
    shape("HTTP/1.0 without a host", b"GET /health HTTP/1.0\r\n\r\n", 200),
    shape("HTTP/1.1 without a host", b"GET /health HTTP/1.1\r\n\r\n", (200, 400)),
    shape("HTTP/0.9", b"GET /health\r\n\r\n", (200, 400)),
    shape("empty lines before", b"\r\n\r\n" + get(), 200),
    shape("two requests", get(headers=b"Connection: keep-alive\r\n") * 2, 200, 200),
    # --- request lines
    shape("HTTP/1.2", get(version=b"HTTP/1.2"), 400),
    shape("HTTP/9.9", get(version=b"HTTP/9.9"), 400),
    shape("http in small letters", get(version=b"http/1.1"), 400),
    shape("another protocol", get(version=b"HTCPCP/1.0"), 400),
    shape("no version", b"GET /health \r\nHost: localhost\r\n\r\n", 400),
    shape("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400),
    shape("TLS's hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 500, 400),
    shape("every byte", bytes(range(256)) * 4, 400),
    shape("zeros", b"\0" * 1000, 400),
    shape("nothing", b""),
    shape("empty lines", b"\r\n" * 1000),
    shape("empty lines without end", b"\r\n" * 200_000, 431),
    shape("one byte", b"G", 408),
    shape("half a head", get()[:-2], 408),
    shape("an unknown method", b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    shape("a method in small letters", b"get /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    shape("a long method", b"A" * 10_000 + b" / HTTP/1.1\r\n\r\n", 400),
    shape("PROPFIND", b"PROPFIND /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    shape("TRACE", b"TRACE /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    shape("CONNECT", b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n", 405),
    shape("CONNECT to a path", b"CONNECT /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    shape("OPTIONS *", b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    shape("PUT", post().replace(b"POST", b"PUT"), 405),
    # --- targets
    shape("a URL", get(b"http://localhost/health"), 200),
    shape("a URL without a path", get(b"http://localhost"), 400),
    shape("a URL with no port of this world", get(b"http://localhost:99999999/health"), 400),
    shape("an authority", get(b"localhost:80"), 400),
    shape("no slash", get(b"health"), 400),
    shape("no target", b"GET  HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    shape("a star", get(b"*"), 404),
    shape("two slashes", get(b"//health"), 404),
    shape("a slash behind", get(b"/health/"), 404),
    shape("%zz", get(b"/%zz"), 404),
    shape("% alone", get(b"/health%"), 404),
    shape("%00", get(b"/%00"), 404),
    shape("%ff", get(b"/%ff%fe"), 404),
    shape("an escaped line", get(b"/%0d%0aX:%20y"), 404),
    shape("half of a surrogate pair", get(b"/%ed%a0%80"), 404),
    shape("an escaped letter", get(b"/%68ealth"), 200),
    shape("UTF-8 in the path", get("/é".encode()), 400),
    shape("Latin-1 in the path", get(b"/\xe9"), 400),
    shape("a control in the path", get(b"/a\x01b"), 400),
    shape("NUL in the path", get(b"/a\0b"), 400),
    shape("a space in the path", get(b"/a b"), 400),
    shape("dots", get(b"/../../etc/passwd"), 404),
    shape("escaped dots", get(b"/v1/%2e%2e/%2e%2e/etc/passwd"), 404),
    shape("dots in a name", get(b"/v1/models/../../health"), 404),
    shape("backslashes", get(b"/..\\..\\x"), 404),
    shape("a query", get(b"/health?a=b&c"), 200),
    shape("a query that is not ASCII", get(b"/health?\xff"), 400),
    shape("a long URL", get(b"/" + b"a" * 60_000), 404),
    shape("too long a URL", get(b"/" + b"a" * 70_000), 431),
    shape("a URL of a megabyte", get(b"/" + b"a" * 1_000_000), 431),
    shape("too long a query", get(b"/health?" + b"a" * 100_000), 431),
    # --- headers
    shape("no colon", get(headers=b"no colon\r\n"), 400),
    shape("no name", get(headers=b": x\r\n"), 400),
    shape("a space in a name", get(headers=b"a b: x\r\n"), 400),
    shape("a space before the colon", get(headers=b"Content-Length : 3\r\n"), 400),
    shape("a folded header", get(headers=b"X: a\r\n b\r\n"), 400),
    shape("the first one folded", b"GET /health HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    shape("NUL in a header", get(headers=b"X: a\0b\r\n"), 400),
    shape("CR in a header", get(headers=b"X: a\rb\r\n"), 400),
    shape("a control in a header", get(headers=b"X: a\x01b\r\n"), 400),
    shape("a name that is not ASCII", get(headers=b"X\xe9: a\r\n"), 400),
    shape("a value that is not ASCII", get(headers=b"X: \xff\xfe\r\n"), 200),
    shape("LF alone", b"GET /health HTTP/1.1\nHost: localhost\n\n", 400),
    shape("CR alone", b"GET /health HTTP/1.1\rHost: localhost\r\r", 400),
    shape("LF once", b"GET /health HTTP/1.1\r\nHost: localhost\n\r\n", 400),
    shape("a long header", get(headers=b"X: " + b"a" * 60_000 + b"\r\n"), 200),
    shape("too long a header", get(headers=b"X: " + b"a" * 70_000 + b"\r\n"), 431),
    shape("too long a header that does not end", get()[:-2] + b"X: " + b"a" * 200_000, 431),
    shape("too long a name", get(headers=b"X" * 70_000 + b": a\r\n"), 431),
    shape("256 headers", get(headers=b"".join(b"h%d: a\r\n" % i for i in range(255))), 200),
    shape("257 headers", get(headers=b"".join(b"h%d: a\r\n" % i for i in range(256))), 431),
    shape("100,000 headers", get(headers=b"a:b\r\n" * 100_000), 431),
    shape("two hosts", get(headers=b"Host: localhost\r\n"), 400),
    shape("another's host", post(host=b"evil.example"), 403),
    shape("an empty host", post(host=b""), 403),
    # --- lengths
    shape("two lengths", post(b"Content-Length: 5\r\n"), 400),
    shape("the same length twice", post(b"Content-Length: %d\r\n" % len(BODY)), 400),
    shape("a list of lengths", post(length=b"5, 5"), 400),
    shape("a negative length", post(length=b"-1"), 400),
    shape("a length with a sign", post(length=b"+34"), 400),
    shape("a length in hex", post(length=b"0x22"), 400),
    shape("a length of 30 digits", post(length=b"9" * 30), 400),
    shape("a length of 99 GB", post(length=b"99999999999"), 413),
    shape("a length of nothing", post(length=b" "), 400),
    shape("a body that does not come", post(length=b"100"), 408),
    shape("no body", post(body=b""), 400),
    shape("a body of no length", post(body=b"", length=b""), 400),
    shape("a body that nobody wants", post().replace(b"/v1/completions", b"/nowhere"), 404),
    shape("half of one", post(length=b"1000000").replace(b"/v1/completions", b"/nowhere"), 404),
    shape("a GET's body", get(headers=b"Content-Length: 3\r\n") + b"abc", 200),
    shape("length and chunks", post(b"Transfer-Encoding: chunked\r\n", WHOLE), 400),
    shape("Transfer-Encoding: identity", post(b"Transfer-Encoding: identity\r\n", length=b""), 400),
    shape("Transfer-Encoding: gzip", post(b"Transfer-Encoding: gzip\r\n", length=b""), 400),
    shape("Transfer-Encoding: chunked, gzip", post(b"Transfer-Encoding: chunked, gzip\r\n", WHOLE, length=b""), 400),
    shape("Transfer-Encoding: xchunked", post(b"Transfer-Encoding: xchunked\r\n", WHOLE, length=b""), 400),
    shape("Transfer-Encoding twice", chunked(WHOLE, b"Transfer-Encoding: chunked\r\n"), 400),
    # --- chunks
    shape("chunks", chunked(WHOLE), 200),
    shape("chunks of a byte", chunked(b"".join(chunk(b"%c" % c) for c in BODY) + END), 200),
    shape("no chunks", chunked(END), 400),
    shape("chunks that do not end", chunked(chunk(BODY)), 408),
    shape("a size that is none", chunked(b"xyz\r\n" + WHOLE), 400),
    shape("a negative size", chunked(b"-5\r\nabcde\r\n"), 400),
    shape("a size beyond 64 bits", chunked(b"f" * 17 + b"\r\n"), 400),
    shape("a size of 64 GB", chunked(b"fffffffff\r\nabc"), 408),
    shape("nothing behind a chunk", chunked(b"%x\r\n" % len(BODY) + BODY + END), 400),
    shape("chunks with LF alone", chunked(b"%x\n" % len(BODY) + BODY + b"\n0\n\n"), 400),
    shape("an extension", chunked(chunk(BODY, b';a="b;c"') + END), 200),
    shape("too long an extension", chunked(chunk(BODY, b";" + b"a" * 300_000) + END), 400),
    shape("trailers", chunked(chunk(BODY) + b"0\r\nX: y\r\nHost: evil.example\r\n\r\n"), 200),
    shape("too long a trailer", chunked(chunk(BODY) + b"0\r\nX: " + b"a" * 300_000 + b"\r\n\r\n"), 400),
    shape("too many trailers", chunked(chunk(BODY) + b"0\r\n" + b"a:b\r\n" * 100_000 + b"\r\n"), 400),
    # --- other protocols
    shape("h2c", post(H2C), 200),
    shape("h2c, chunks", chunked(WHOLE, H2C), 200),
    shape("h2c, twice", post(H2C) * 2, 200, 200),
    shape("h2c, no body", get(headers=H2C), 200),
    shape("h2c, half a body", post(H2C, length=b"100"), 408),
    shape("a web socket", get(headers=WEBSOCKET), 200),
    shape("a web socket nowhere", get(b"/nowhere", WEBSOCKET), 404),
    shape("a web socket, a body", post(WEBSOCKET), 200),
    shape("both", post(H2C + WEBSOCKET), 200),
    shape("TLS", post(b"Connection: close, Upgrade\r\nUpgrade: TLS/1.0, x\r\n"), 200),
    # --- several requests
    shape("three", post() * 3, 200, 200, 200),
    shape("12", get() * 12, *[200] * 9, at_any_pace=False),
    shape("20,000", get() * 20_000, *[200] * 9, at_any_pace=False),
    shape("one and garbage", get() + b"garbage\r\n\r\n" + get(), 200, at_any_pace=False),
    shape("one and a bad chunk", post() + chunked(b"xyz\r\n"), 200, at_any_pace=False),
    shape("two and a bad chunk", post() * 2 + chunked(chunk(BODY) + b"xyz\r\n"), 200, 200, at_any_pace=False),
    shape("one and a half", get() + get()[:-5], 200, at_any_pace=False),
    shape("one behind the last", get(headers=b"Connection: close\r\n") + get(), 200, at_any_pace=False),
    # --- bodies
    shape("asked first", post(b"Expect: 100-continue\r\n"), 200),
    shape("an odd expectation", post(b"Expect: 200-ok\r\n"), 200),
    shape("text/plain", post().replace(b"application/json", b"text/plain"), 400),
    shape("a form", post().replace(b"application/json", b"application/x-www-form-urlencoded"), 400),
    shape("no type", post().replace(JSON, b""), 400),
]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class _Bytes:
    """Minimal socket for :class:`http.client.HTTPResponse`."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def makefile(self, _mode: str) -> io.BytesIO:
        return self._file


def answers(received: bytes) -> list[Answer]:
    """Parse the bytes of a connection into responses."""
    found = []
    while received:
        file = io.BytesIO(received)
        file.close = lambda: None  # type: ignore[method-assign]
        response = http.client.HTTPResponse(_Bytes(file), method="GET")  # type: ignore[arg-type]
        response.begin()
        body = response.read()
        if response.status != 100:
            found.append(Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, body))
        received = received[file.tell() :]
    return found


async def exchange(port: int, data: bytes, piece: int | None = None) -> bytes:
    """Send ``data`` and return all bytes that the server sends until it closes the connection by itself.

    Args:
        piece: bytes sent at a time; the event loop runs in between. Default: all bytes at once.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(DEADLINE):
            for start in range(0, len(data), piece or len(data) or 1):
                writer.write(data[start : start + (piece or len(data))])
                await asyncio.sleep(0)
            while part := await reader.read(65536):
                received += part
    except ConnectionError:  # the server closed the connection while data was unsent
        pass
    finally:
        writer.close()
    return received


def address(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition("/")[2].partition(":")
    return host, int(port)


@contextmanager
def crowd(url: str, number: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Open ``number`` connections that send only ``data``."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(number):
            sockets.append(one := socket.create_connection(address(url), timeout=DEADLINE))
            one.sendall(data)
        yield sockets
    finally:
        for one in sockets:
            one.close()


def rest(one: socket.socket) -> bytes:
    """Return all bytes received until the server closes the connection."""
    received = b""
    try:
        while part := one.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received
