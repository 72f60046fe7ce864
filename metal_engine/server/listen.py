"""Socket that the server listens on.

Bound before the model is loaded, to detect a port in use at once.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.server.connections.limits import ConnectionLimits, connection_limits
from metal_engine.settings.server_args import ServerArgs


@dataclass(frozen=True)
class Listener:
    """Bound socket that does not listen yet.

    Attributes:
        url: URL that clients use.
        limits: limits on connections.
        tls: uvicorn's options for TLS; empty without TLS.
    """

    socket: socket.socket
    url: str
    limits: ConnectionLimits
    tls: dict[str, Any] = field(default_factory=dict)


@contextmanager
def listen(args: ServerArgs) -> Iterator[Listener]:
    """Within this context, the address in ``args`` is bound: ``--uds``, or ``--host`` and ``--port``.

    Yields the bound socket. At the end of the context, the socket is closed, and the file of a Unix socket is removed.

    Raises:
        ConfigError: the address is in use, forbidden or invalid, the certificate cannot be used, or the limit of open
            files is too low. The message names the flag.
    """
    limits, tls = connection_limits(args), tls_options(args)
    scheme = "http" if args.ssl_certfile is None else "https"
    bound, url = _bind_tcp(args.host, args.port, scheme) if args.uds is None else _bind_unix(args.uds)
    made = None if args.uds is None else os.lstat(args.uds)
    try:
        yield Listener(bound, url, limits, tls)
    finally:
        bound.close()
        if args.uds is not None and made is not None:
            with suppress(OSError):
                # Another server may have created its socket at the same path in the meantime.
                if os.path.samestat(os.lstat(args.uds), made):
                    os.unlink(args.uds)


def tls_options(args: ServerArgs) -> dict[str, Any]:
    """Return uvicorn's options for TLS; an empty dict without TLS.

    Raises:
        ConfigError: a certificate or key file cannot be read or used.
    """
    if args.ssl_certfile is None:
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password or "")
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        problem = f"--ssl-certfile, --ssl-keyfile or ssl-ca-certs cannot be used: {error}"
        raise ConfigError("--ssl-certfile", problem) from error
    names = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
    requires = ssl.CERT_NONE if args.ssl_ca_certs is None else ssl.CERT_REQUIRED
    return {"ssl_cert_reqs": requires, **{name: getattr(args, name) for name in names}}


def _bind_tcp(host: str, port: int, scheme: str) -> tuple[socket.socket, str]:
    try:
        # An empty host means all addresses, as for --host 0.0.0.0.
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError("--host", f"{host}: no such address") from error
    # A name may have addresses of both kinds. The first IPv4 address is bound, as in vLLM: more clients use it.
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        if sys.platform == "darwin" and port and _is_listening(family, address):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _bind_problem(error, host, port) from error
    own_address, own_port = bound.getsockname()[:2]
    shown = host or own_address
    return bound, f"{scheme}://[{shown}]:{own_port}" if ":" in shown else f"{scheme}://{shown}:{own_port}"


def _is_listening(family: int, address: Any) -> bool:
    """Return True if a program listens on the port of ``address``, an address of this machine.

    On macOS, SO_REUSEADDR allows two programs to listen on a port if one of them listens on all addresses.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0


def _bind_problem(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        problem = f"--port {port} is in use on {host}: stop the process that listens there, or choose another --port"
        return ConfigError("--port", problem)
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError("--port", f"{port} may not be listened on: {error.strerror}; choose one above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError("--host", f"{host} is not an address of this machine")
    return ConfigError("--port", f"cannot listen on --host {host} --port {port}: {error.strerror}")


def _bind_unix(path: str) -> tuple[socket.socket, str]:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise ConfigError("--uds", f"{path}: {error.strerror or error}") from error
    return bound, f"unix:{path}"


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that has ended. Keep a socket on which a server responds, and any other file."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
