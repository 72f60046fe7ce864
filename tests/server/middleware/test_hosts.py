"""Host names that a server accepts."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from metal_engine.server.middleware import hosts
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.serving import Served, serve

OWN = socket.gethostname()
KNOWN = [
    *("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]", "::1"),
    *("192.168.1.5:8000", "[fe80::1%25eth0]:8000", "app.localhost:3000", OWN, f"{OWN}:8000"),
    *("host.docker.internal:8000", "host.containers.internal"),
]
UNKNOWN = [
    *("[::1].evil.example", "[::1]8000", "evil.example", "evil.example:8000", "localhost.evil.example"),
    *("127.0.0.1.evil.example", "notlocalhost", "", "localhost@evil.example", "evil.example#localhost"),
    *("localhost,evil.example", "localhost evil.example", "0x7f.1"),
]


def status(served: Served, host: str, **headers: str) -> int:
    with httpx.Client(base_url=served.url, headers={"host": host, **headers}, verify=False) as client:
        statuses = {
            client.get("/v1/models").status_code,
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code,
        }
    assert len(statuses) == 1
    return statuses.pop()


def test_names(served: Served) -> None:
    assert [host for host in KNOWN if status(served, host) != 200] == []
    assert [host for host in UNKNOWN if status(served, host) != 403] == []


def test_what_the_refused_are_told(served: Served) -> None:
    response = httpx.get(served.url + "/health", headers={"host": "evil.example:8000"})
    error = check_error(response, 403, None, "host_not_allowed")
    assert "--allowed-hosts" in error["message"] and "evil.example" in error["message"]
    response = httpx.post(served.url + "/v1/messages", headers={"host": "evil.example"}, json={})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


def test_allowed_hosts() -> None:
    with serve(args=ServerArgs(allowed_hosts=("Engine.example", "other"), shutdown_timeout=1)) as served:
        assert status(served, "engine.example:443") == status(served, "OTHER") == status(served, "localhost") == 200
        assert status(served, "evil.example") == status(served, "sub.engine.example") == 403


def test_host_is_allowed() -> None:
    args = ServerArgs(host="engine.example")
    known = hosts._known_names(args)
    assert hosts.checks_hosts(args)
    assert hosts._is_allowed("engine.example:8000", known) and not hosts._is_allowed("example", known)


@pytest.mark.parametrize("own", ["mac", "Mac.local", "mac.fritz.box"])
def test_names_of_this_machine(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    known = hosts._known_names(ServerArgs())
    assert all(hosts._is_allowed(host, known) for host in (own, "mac:8000", "mac.local:8000"))
    assert not any(hosts._is_allowed(host, known) for host in ("fritz.box", "fritz", "mac.evil.example"))


@pytest.mark.parametrize(
    ("args", "is_checked"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, True),
        ({"api_key": ("k",)}, False),
        ({"uds": "engine.sock"}, False),
        ({"ssl_certfile": "c", "ssl_keyfile": "k"}, False),
        ({"allowed_hosts": ("*",)}, False),
        ({"allowed_hosts": ("a", "*")}, False),
        ({"allowed_hosts": ("a",), "api_key": ("k",)}, True),
    ],
)
def test_when_names_matter(args: dict[str, Any], is_checked: bool) -> None:
    assert hosts.checks_hosts(ServerArgs(**args)) == is_checked


def test_with_a_key_any_name_will_do() -> None:
    with serve(args=ServerArgs(api_key=("k",), shutdown_timeout=1)) as served:
        assert status(served, "evil.example", authorization="Bearer k") == 200
        assert status(served, "evil.example") == 401
