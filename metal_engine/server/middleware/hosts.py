"""Checks the ``Host`` header, so that web pages cannot reach a server without a key under their own host names."""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_engine.server.errors import APIError
from metal_engine.server.refusal import refuse
from metal_engine.settings.server_args import ServerArgs

ANY = "*"
# Names for the host machine inside containers. Public name servers cannot serve these names.
_OF_CONTAINERS = ("host.docker.internal", "host.containers.internal")


def checks_hosts(args: ServerArgs) -> bool:
    """Return True if the server must check the ``Host`` header of requests.

    The check stops DNS rebinding: a web page makes its own host name resolve to this machine. The check is
    not needed with a key or TLS, or on a Unix socket: the page lacks the key, a certificate for its name, or access to
    the socket.
    ``--allowed-hosts`` turns the check on in every case. ``--allowed-hosts '*'`` turns it off.
    """
    if args.allowed_hosts:
        return ANY not in args.allowed_hosts
    return not args.api_key and args.ssl_certfile is None and args.uds is None


def allow_hosts(app: ASGIApp, args: ServerArgs) -> ASGIApp:
    """Wrap ``app``: reject requests whose ``Host`` is not known with status 403.

    Known hosts are all IP addresses, loopback names, names of this machine, ``--host`` and ``--allowed-hosts``.

    Requests without a ``Host`` header pass, because browsers always send the header.
    """
    known = _known_names(args)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if not all(_is_allowed(host, known) for host in hosts):
                await refuse(_refusal(hosts), scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _refusal(hosts: list[str]) -> APIError:
    shown = ", ".join(hosts)[:100]
    problem = f"this server is not known as {shown!r}; start it with --allowed-hosts NAME to allow that"
    return APIError(403, problem, code="host_not_allowed", headers={"connection": "close"})


def _known_names(args: ServerArgs) -> frozenset[str]:
    given = {_without_port(name).lower().rstrip(".") for name in (args.host, *args.allowed_hosts)}
    own = socket.gethostname().lower()
    label = own.partition(".")[0]  # `own` may end with the domain of the network, as in mac.fritz.box
    return frozenset({"localhost", own, label, f"{label}.local", *_OF_CONTAINERS, *given} - {""})


def _is_allowed(host: str, known: frozenset[str]) -> bool:
    name = _without_port(host).lower().rstrip(".")
    # An address means the same machine for every client, so a web page cannot redirect it.
    return name in known or name.endswith(".localhost") or _is_address(name)


def _without_port(host: str) -> str:
    """Return a host without its port: ``localhost:8000`` -> ``localhost``, ``[::1]:8000`` -> ``::1``."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name if re.fullmatch(r"(:\d*)?", port) else host
    return host if host.count(":") > 1 else host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
