"""Which names a server without a key answers to: a web page must not reach it under a name of the page's own."""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_engine.server.errors import APIError, error_response
from metal_engine.settings.args import ServerArgs

ANY = "*"
# Names by which containers know the machine they run on. No public name server can have them.
_OF_CONTAINERS = ("host.docker.internal", "host.containers.internal")


def checks_hosts(args: ServerArgs) -> bool:
    """Whether the name in a request's ``Host`` matters.

    A page whose name has come to mean this machine (DNS rebinding) has no key, cannot have a certificate for its name,
    and cannot open a unix socket.
    """
    if args.allowed_hosts:
        return ANY not in args.allowed_hosts
    return not args.api_key and args.ssl_certfile is None and args.uds is None


def allow_hosts(app: ASGIApp, args: ServerArgs) -> ASGIApp:
    """``app`` for requests whose ``Host`` is an address, a loopback name, ``--host``, this machine or allowed.

    Requests without a ``Host`` pass: no browser sends one.
    """
    known = _known_names(args)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if not all(_is_allowed(host, known) for host in hosts):
                await error_response(_refusal(hosts), scope)(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _refusal(hosts: list[str]) -> APIError:
    shown = ", ".join(hosts)[:100]
    problem = f"this server has no key and is not known as {shown!r}; start it with --allowed-hosts NAME to allow that"
    return APIError(403, problem, code="host_not_allowed", headers={"connection": "close"})


def _known_names(args: ServerArgs) -> frozenset[str]:
    given = {name.lower().rstrip(".") for name in (args.host, *args.allowed_hosts)}
    own = socket.gethostname().lower()
    return frozenset({"localhost", own, f"{own.removesuffix('.local')}.local", *_OF_CONTAINERS, *given} - {""})


def _is_allowed(host: str, known: frozenset[str]) -> bool:
    name = _without_port(host).lower().rstrip(".")
    # An address means the same machine for whoever uses it, so a page cannot make it mean another.
    return name in known or name.endswith(".localhost") or _is_address(name)


def _without_port(host: str) -> str:
    """``localhost:8000`` -> ``localhost``, ``[::1]:8000`` -> ``::1``."""
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
