"""Fake Hugging Face hub on the loopback interface with the routes that the hub's client and this project use."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

TOKEN = "hf_secret"
_LARGE = (".safetensors", ".gguf", ".bin")  # stored by content hash, as with LFS
_HASHED_BYTES = 100_000_000  # sparse files of terabytes are not read for their hash


@dataclass
class Repo:
    """Repository that serves the files of a folder. Can require a token, or answer every request with a fixed status.

    Attributes:
        cut_after: number of bytes of a file's content after which the connection breaks, once for each file.
    """

    folder: Path
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    status: int | None = None
    cut_after: int | None = None

    @property
    def files(self) -> dict[str, Path]:
        return {p.relative_to(self.folder).as_posix(): p for p in sorted(self.folder.rglob("*")) if p.is_file()}

    def commit(self, revision: str) -> str:
        return hashlib.sha1(f"{self.folder}{revision}".encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of a response. The body is bytes or a range of a file."""

    status: int
    headers: dict[str, str]
    body: bytes | Path = b""
    first: int = 0
    size: int = 0
    sent: int = 0  # bytes sent before the connection breaks


@dataclass
class FakeHub:
    """Serves ``repos`` until it is closed.

    Attributes:
        repos: repositories by id.
        requests: requested paths.
        tokens: tokens that clients sent.
        sent: bytes of bodies sent, by path.
    """

    repos: dict[str, Repo]
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    says_why: bool = True
    """True if a response names what is missing in a repository, as the real hub does. Some mirrors do not."""

    def __enter__(self) -> FakeHub:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._cut: set[str] = set()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def file_bytes(self) -> int:
        """Bytes of files sent, without API responses."""
        return sum(num for path, num in self.sent.items() if "/resolve/" in path)

    def answer(self, path: str, token: str | None, wanted: str | None) -> Answer:
        """Return the response for a path. ``wanted`` is the ``Range`` header of the request."""
        self.requests.append(path)
        self.tokens.add(token)
        parts = path.split("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repo = self.repos.get("/".join(parts[:2]))
        if repo is None:
            return _error(401, "RepoNotFound", b"Repository Not Found") if self.says_why else _error(404, "", b"no")
        if repo.status is not None:
            return _error(repo.status, "", b"out of order")
        # the API shows the contents of a gated repository to all clients
        if repo.gated and token != TOKEN and not is_api:
            return _error(403, "GatedRepo", b"Access to this repository is restricted")
        kind, revision = parts[2:4] if len(parts) > 3 else ("revision", "main")
        commits = {repo.commit(name): name for name in repo.revisions}
        if revision not in repo.revisions and revision not in commits:
            return _error(404, "RevisionNotFound", b"Revision Not Found")
        commit = revision if revision in commits else repo.commit(revision)
        if is_api:
            body = json.dumps(_api(repo, kind, commit)).encode()
            return Answer(200, {"Content-Type": "application/json"}, body, 0, len(body), len(body))
        return self._file(repo, "/".join(parts[4:]), commit, wanted, path)

    def _file(self, repo: Repo, name: str, commit: str, wanted: str | None, path: str) -> Answer:
        file = repo.files[name]
        size = file.stat().st_size
        headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
        first = int(match[1]) if match else 0
        end = min(int(match[2]) + 1, size) if match and match[2] else size
        if match:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        sent = end - first
        if repo.cut_after is not None and path not in self._cut and repo.cut_after < sent:
            self._cut.add(path)
            sent = repo.cut_after
        return Answer(206 if match else 200, headers, file, first, end - first, sent)


def use_endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the hub at a URL in this process in place of the configured hub."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()


@contextlib.contextmanager
def asked_hub(repos: dict[str, Repo], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Start a hub and use it in this process in place of the configured hub."""
    with FakeHub(repos) as hub:
        use_endpoint(hub.url, monkeypatch)
        yield hub
        close_session()


def _error(status: int, code: str, body: bytes) -> Answer:
    return Answer(status, {"X-Error-Code": code} if code else {}, body, 0, len(body), len(body))


def _digest(path: Path) -> str:
    """Return a digest that names a file: SHA-256 for large files, SHA-1 for others."""
    if not path.name.endswith(_LARGE):
        return hashlib.sha1(path.read_bytes()).hexdigest()
    content = path.read_bytes() if path.stat().st_size < _HASHED_BYTES else path.name.encode()
    return hashlib.sha256(content).hexdigest()


def _api(repo: Repo, kind: str, commit: str) -> Any:
    if kind == "tree":
        return [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}
            for name, path in repo.files.items()
        ]
    siblings = [_sibling(name, path) for name, path in repo.files.items()]
    return {"id": "x/y", "sha": commit, "siblings": siblings, "gated": "auto" if repo.gated else False}


def _sibling(name: str, path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    found: dict[str, Any] = {"rfilename": name, "size": size, "blobId": _digest(path)}
    if name.endswith(_LARGE):
        found["lfs"] = {"sha256": _digest(path), "size": size, "pointerSize": 134}
    return found


def _handler(hub: FakeHub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            answer = hub.answer(self.path, token, self.headers.get("Range"))
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(answer.size)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self._send(answer)

        do_HEAD = do_GET

        def _send(self, answer: Answer) -> None:
            hub.sent.setdefault(self.path, 0)
            if isinstance(answer.body, bytes):
                self.wfile.write(answer.body)
                hub.sent[self.path] += answer.sent
                return
            with answer.body.open("rb") as file:
                file.seek(answer.first)
                left = answer.sent
                while left:
                    data = file.read(min(left, 1 << 16))
                    self.wfile.write(data)
                    hub.sent[self.path] += len(data)
                    left -= len(data)
            if answer.sent < answer.size:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
