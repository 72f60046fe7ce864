"""A Hugging Face hub on the loopback interface, with what ``snapshot_download`` asks for. Runs in tests only."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKEN = "hf_secret"


@dataclass
class Repo:
    """A repository: files of a folder, perhaps behind a token, perhaps with a status that every request gets."""

    folder: Path
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    status: int | None = None

    @property
    def files(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted(self.folder.iterdir()) if p.is_file()}

    def commit(self, revision: str) -> str:
        return hashlib.sha1(f"{self.folder}{revision}".encode()).hexdigest()


@dataclass
class FakeHub:
    """Serves ``repos`` until it is closed; ``requests`` are the paths asked for, ``tokens`` the tokens given."""

    repos: dict[str, Repo]
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def __enter__(self) -> FakeHub:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        self.requests.append(path)
        self.tokens.add(token)
        parts = path.split("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repo = self.repos.get("/".join(parts[:2]))
        if repo is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"Repository Not Found"
        if repo.status is not None:
            return repo.status, {}, b"out of order"
        if repo.gated and token != TOKEN:
            return 403, {"X-Error-Code": "GatedRepo"}, b"Access to this repository is restricted"
        kind, revision = parts[2], parts[3]
        commits = {repo.commit(name): name for name in repo.revisions}
        if revision not in repo.revisions and revision not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"Revision Not Found"
        commit = revision if revision in commits else repo.commit(revision)
        if is_api:
            return 200, {"Content-Type": "application/json"}, json.dumps(_api(repo, kind, commit)).encode()
        body = repo.files[parts[4]]
        etag = hashlib.sha1(body).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, body


def _api(repo: Repo, kind: str, commit: str) -> Any:
    if kind == "tree":
        return [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in repo.files.items()
        ]
    return {"id": "x/y", "sha": commit, "siblings": [{"rfilename": name} for name in repo.files]}


def _handler(hub: FakeHub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, headers, body = hub.answer(self.path, token)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
