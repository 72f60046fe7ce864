"""Files of the web page: plain HTML, CSS and JavaScript modules, read once and served unchanged."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
# URL prefix of the files: `/page/js/main.js`. The page itself is at `/`.
PREFIX = "/page/"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Scripts, styles and connections may come only from this server. Output of a model becomes HTML only through the policy
# that sanitizes it: browsers with support for trusted types reject everything else.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",  # images that the user has added
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Browsers revalidate each file, usually with a 304 response. After an upgrade, a page never mixes two versions.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file with its media type, and the ETag with which browsers revalidate their copy."""

    data: bytes
    media_type: str
    etag: str

    def response(self, if_none_match: str) -> Response:
        """Return a response with the file, or with status 304 if the client has this version.

        Args:
            if_none_match: value of the request header of that name; empty if there is none.
        """
        headers = {**_HEADERS, "etag": self.etag}
        if self.etag in if_none_match:
            return Response(status_code=304, headers=headers)
        return Response(self.data, headers={**headers, "content-type": self.media_type})


def load_files() -> dict[str, PageFile]:
    """Read all files. The keys are paths below ``PREFIX``."""
    found = {}
    for path in sorted(STATIC.rglob("*")):
        if path.suffix in _TYPES:
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()[:32]
            found[path.relative_to(STATIC).as_posix()] = PageFile(data, _TYPES[path.suffix], f'"{digest}"')
    return found


def wants_html(headers: Headers) -> bool:
    return "text/html" in headers.get("accept", "")


def is_open(scope: Scope) -> bool:
    """Return True if a request is for the page's files, which need no key.

    The page itself asks the user for the key.
    """
    path: str = scope["path"]
    return path.startswith(PREFIX) or (path == "/" and wants_html(Headers(scope=scope)))
