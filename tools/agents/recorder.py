"""Proxy between an agent and the server. Records every request with its response."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

_SECONDS = 900.0
_OWN_HEADERS = {"connection", "content-length", "transfer-encoding", "host", "accept-encoding", "keep-alive"}


@dataclass(frozen=True)
class Exchange:
    """A request and its response.

    Attributes:
        time: time of the request, in seconds since the epoch.
        method: method of the request.
        path: path of the request, with its query.
        request: body of the request.
        status: status of the response; 0 if the server did not respond.
        response: body of the response.
    """

    time: float
    method: str
    path: str
    request: str
    status: int
    response: str


def read_exchanges(path: Path) -> list[Exchange]:
    """Read a file of recorded exchanges. Return an empty list if the file is missing."""
    if not path.exists():
        return []
    return [Exchange(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def recording(server: str, log: Path) -> Iterator[str]:
    """Yield the URL of a proxy in front of ``server``. A line of JSON for each exchange is written to ``log``."""
    address = urlsplit(server).netloc
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            began = time.time()
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = http.client.HTTPConnection(address, timeout=_SECONDS)
            status, received = 0, b""
            self.close_connection = True
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN_HEADERS}
                connection.request(self.command, self.path, body or None, headers)
                response = connection.getresponse()
                status = response.status
                self.send_response_only(status)
                for name, value in response.getheaders():
                    if name.lower() not in _OWN_HEADERS:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                while piece := response.read1(65536):
                    received += piece
                    self.wfile.write(piece)
                    self.wfile.flush()
            except (OSError, http.client.HTTPException) as error:
                received += f"\n{type(error).__name__}: {error}".encode()
            finally:
                connection.close()
                texts = body.decode(errors="replace"), received.decode(errors="replace")
                exchange = Exchange(began, self.command, self.path, texts[0], status, texts[1])
                with lock, log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(exchange)) + "\n")

        do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = forward

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, name="recorder")
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
