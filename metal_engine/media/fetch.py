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
from concurrent.futures import Future, wait
from urllib.parse import SplitResult, urljoin, urlsplit

from metal_engine.cancellation import check_cancelled
from metal_engine.download_tls import download_tls_context
from metal_engine.media.limits import MAX_FILE_BYTES

# Maximum time for a download, redirects included, in seconds.
_SECONDS = 15.0
# Maximum wait for a connection or for the next bytes, in seconds.
_SILENT_SECONDS = 5.0
_MAX_REDIRECTS = 3
# Maximum length of a URL, as in browsers and servers.
_MAX_URL = 8192
# Maximum number of host names that are resolved at once. A resolver cannot be interrupted.
_MAX_RESOLVING = 16
# Interval at which a waiting request checks for cancellation.
_POLL_SECONDS = 0.02
_REDIRECTS = (301, 302, 303, 307, 308)
_BYTES_AT_ONCE = 1 << 16
# Addresses that a gateway translates to the IPv4 address in their last bits.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# All public IPv6 addresses. `is_global` is also true of site-local and some reserved addresses.
_IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")
_FLAG = "--allowed-media-domains"
_resolving = threading.BoundedSemaphore(_MAX_RESOLVING)


class FetchError(Exception):
    """The download of a file is not allowed or has failed."""


def fetch(url: str, allowed_domains: Sequence[str]) -> bytes:
    """Download a file.

    The host of the URL and the hosts of all redirects must be allowed, and their addresses must be public. The
    connection uses an address that was checked, because the name could later resolve to another address.

    Args:
        url: http or https URL.
        allowed_domains: names of the allowed hosts. Their subdomains are not allowed. If empty, no download is allowed.

    Raises:
        FetchError: a host is not allowed, the file is too large, or the download fails or takes too long.
        Cancelled: the request was cancelled.
    """
    deadline = time.monotonic() + _SECONDS
    try:
        for _ in range(_MAX_REDIRECTS + 1):
            parts = _checked(url, allowed_domains)
            connection, sock = _connect(parts, deadline)
            # The timeout of a socket applies to each read, so a slow handshake or answer could take forever.
            timer = threading.Timer(max(deadline - time.monotonic(), 0.0), _shut, [sock])
            timer.daemon = True
            try:
                timer.start()
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                # The connection would add the port to the host of https, which signatures of URLs do not cover.
                headers = {"Host": parts.netloc, "User-Agent": "metal-engine", "Accept": "image/*"}
                connection.request("GET", path, headers=headers)
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
    except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:  # RuntimeError: no more threads
        raise FetchError(f"cannot be downloaded: {error or type(error).__name__}") from error
    raise FetchError(f"has more than {_MAX_REDIRECTS} redirects")


def _checked(url: str, allowed_domains: Sequence[str]) -> SplitResult:
    if not allowed_domains:
        raise FetchError(f"is not downloaded: send the image as a data URL, or start the server with {_FLAG}")
    if len(url) > _MAX_URL:
        raise FetchError(f"has a URL of more than {_MAX_URL} characters")
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


def _connect(parts: SplitResult, deadline: float) -> tuple[http.client.HTTPConnection, socket.socket]:
    """Return a connection to a host with public addresses, and its socket. The TLS handshake has not begun.

    Raises:
        FetchError: the host has an address that is not public.
        OSError: the name cannot be resolved, or no address can be connected in time.
        Cancelled: the request was cancelled.
    """
    assert parts.hostname is not None
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    addresses = _resolved(parts.hostname, port, deadline)
    if not all(is_public(address) for address, _ in addresses):
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
            sock = raw
            if is_secure:
                sock = download_tls_context().wrap_socket(
                    raw, server_hostname=parts.hostname, do_handshake_on_connect=False
                )
        except BaseException:
            raw.close()
            raise
        connection.sock = sock
        return connection, sock
    raise error or OSError("the host has no address")


def _resolved(host: str, port: int, deadline: float) -> list[tuple[str, int]]:
    """Return the addresses of a host, each with the port. Resolves the name in a separate thread.

    After the deadline, or if the request is cancelled, the thread continues until the resolver returns.

    Raises:
        FetchError: too many names are being resolved.
        OSError: the name cannot be resolved, or the deadline has passed.
        Cancelled: the request was cancelled.
    """
    if not _resolving.acquire(blocking=False):
        raise FetchError(f"cannot be downloaded: {_MAX_RESOLVING} other host names are being resolved")
    done: Future[list[tuple[str, int]]] = Future()

    def resolve() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            done.set_result([(str(address[0]), int(address[1])) for *_, address in found])
        except (OSError, UnicodeError) as error:
            done.set_exception(error)
        finally:
            _resolving.release()

    try:
        threading.Thread(target=resolve, daemon=True).start()
    except RuntimeError as error:
        _resolving.release()
        raise OSError(str(error)) from error
    while not done.done():
        check_cancelled()
        wait([done], min(_left(deadline), _POLL_SECONDS))
    return done.result()


def is_public(address: str) -> bool:
    """Return True if an address belongs to the public internet.

    If an IPv6 address contains an IPv4 address, the IPv4 address decides.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        within = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in _NAT64:
            within = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if within is None:
            return parsed.is_global and parsed in _IPV6_UNICAST
        parsed = within
    return parsed.is_global and not parsed.is_multicast


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
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # the method of an SSLSocket would end its TLS state in use


def _left(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError if the deadline has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"takes more than {_SECONDS:g} s")
    return left
