"""Downloads image files from allowed hosts. Connects to public addresses only."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from metal_engine.cancellation import check_cancelled
from metal_engine.media.limits import MAX_FILE_BYTES

# Maximum time for a download, redirects included, in seconds.
_SECONDS = 15.0
# Maximum wait for a connection or for the next bytes, in seconds.
_SILENT_SECONDS = 5.0
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_BYTES_AT_ONCE = 1 << 16
# Addresses that a gateway translates to the IPv4 address in their last bits.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_FLAG = "--allowed-media-domains"


class FetchError(Exception):
    """The download of a file is not allowed or has failed."""


def fetch(url: str, allowed_domains: Sequence[str]) -> bytes:
    """Download a file.

    Every host on the way must be allowed, and its addresses must be public. The connection uses the checked address,
    so that the name cannot resolve to another address later.

    Args:
        allowed_domains: names of hosts.

    Raises:
        FetchError: a host is not allowed, the file is too large, or the download fails or takes too long.
        Cancelled: the request was cancelled.
    """
    deadline = time.monotonic() + _SECONDS
    try:
        for _ in range(_MAX_REDIRECTS + 1):
            parts = _checked(url, allowed_domains)
            connection = _connect(parts, deadline)
            assert connection.sock is not None
            # The timeout of a socket applies to each read, so a slow answer could take forever.
            timer = threading.Timer(_left(deadline), _shut, [connection.sock])
            timer.daemon = True
            timer.start()
            try:
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", path, headers={"User-Agent": "metal-engine", "Accept": "image/*"})
                response = connection.getresponse()
                if response.status in _REDIRECTS and (place := response.getheader("location")):
                    url = urljoin(url, place)
                    continue
                if response.status != 200:
                    raise FetchError(f"{parts.hostname} answers with status {response.status}")
                return _content(response, deadline)
            finally:
                timer.cancel()
                connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"cannot be downloaded: {error or type(error).__name__}") from error
    raise FetchError(f"has more than {_MAX_REDIRECTS} redirects")


def _checked(url: str, allowed_domains: Sequence[str]) -> SplitResult:
    if not allowed_domains:
        raise FetchError(f"is not downloaded: send the image as a data URL, or start the server with {_FLAG}")
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host:
        raise FetchError("is not an http or https URL")
    if parts.username is not None or parts.password is not None:
        raise FetchError("contains a user name or a password")
    if host.lower().rstrip(".") not in {domain.lower() for domain in allowed_domains}:
        raise FetchError(f"{host[:200]} is not one of {_FLAG}")
    if not url.isascii() or any(character <= " " for character in url):
        raise FetchError("has characters that must be escaped")
    return parts


def _connect(parts: SplitResult, deadline: float) -> http.client.HTTPConnection:
    assert parts.hostname is not None
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    addresses = [(str(address[0]), int(address[1])) for *_, address in found]
    if not all(_is_public(address) for address, _ in addresses):
        raise FetchError(f"{parts.hostname} has an address that is not public")
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=_SILENT_SECONDS)
    error: OSError | None = None
    for address in addresses:
        try:
            raw = socket.create_connection(address, timeout=min(_left(deadline), _SILENT_SECONDS))
        except OSError as failed:
            error = failed
            continue
        try:
            connection.sock = (
                ssl.create_default_context().wrap_socket(raw, server_hostname=parts.hostname) if is_secure else raw
            )
        except BaseException:
            raw.close()
            raise
        return connection
    raise error or OSError("the host has no address")


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    within = [parsed]  # the address, and IPv4 addresses inside it
    if isinstance(parsed, ipaddress.IPv6Address):
        within += [one for one in (parsed.ipv4_mapped, parsed.sixtofour) if one is not None]
        if parsed in _NAT64:
            within.append(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))
    return all(one.is_global and not one.is_multicast for one in within)


def _content(response: http.client.HTTPResponse, deadline: float) -> bytes:
    if response.length is not None and response.length > MAX_FILE_BYTES:
        raise FetchError(f"has more than {MAX_FILE_BYTES >> 20} MiB")
    pieces, size = [], 0
    while piece := response.read1(_BYTES_AT_ONCE):
        check_cancelled()
        _left(deadline)
        size += len(piece)
        if size > MAX_FILE_BYTES:
            raise FetchError(f"has more than {MAX_FILE_BYTES >> 20} MiB")
        pieces.append(piece)
    _left(deadline)  # a download that was cut looks complete
    if response.length:
        raise FetchError("is incomplete")
    return b"".join(pieces)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _left(deadline: float) -> float:
    """Return the seconds for the next operation. Raises TimeoutError if the download has taken too long."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"takes more than {_SECONDS:g} s")
    return left
