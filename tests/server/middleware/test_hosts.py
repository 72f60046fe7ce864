"""Host names that a server accepts, and requests that a page of another origin makes a browser send."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import httpx
import pytest

from metal_engine.server.middleware import hosts
from metal_engine.server.middleware.origins import FROM_OWN_PAGE
from metal_engine.server.page.files import STATIC
from metal_engine.server.page.viewers import MAX_VIEWERS
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.serving import DEADLINE, Served, serve

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


def test_host_refusal_names_the_host_and_the_allowed_hosts_flag(served: Served) -> None:
    response = httpx.get(served.url + "/health", headers={"host": "evil.example:8000"})
    error = check_error(response, 403, None, "host_not_allowed")
    assert "--allowed-hosts" in error["message"] and "evil.example" in error["message"]
    response = httpx.post(served.url + "/v1/messages", headers={"host": "evil.example"}, json={})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


def test_allowed_hosts() -> None:
    with serve(args=ServerArgs(allowed_hosts=("Engine.example:8000", "other"), shutdown_timeout=1)) as served:
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


@pytest.mark.parametrize(("args", "is_checked"), [
    ({}, True),
    ({"host": "0.0.0.0"}, True),
    ({"api_key": ("k",)}, False),
    ({"uds": "engine.sock"}, False),
    ({"ssl_certfile": "c", "ssl_keyfile": "k"}, False),
    ({"allowed_hosts": ("*",)}, False),
    ({"allowed_hosts": ("a", "*")}, False),
    ({"allowed_hosts": ("a",), "api_key": ("k",)}, True),
])  # fmt: skip
def test_when_names_matter(args: dict[str, Any], is_checked: bool) -> None:
    assert hosts.checks_hosts(ServerArgs(**args)) == is_checked


def test_with_a_key_any_name_will_do() -> None:
    with serve(args=ServerArgs(api_key=("k",), shutdown_timeout=1)) as served:
        assert status(served, "evil.example", authorization="Bearer k") == 200
        assert status(served, "evil.example") == 401


BROWSER = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36"
ORIGIN = "https://evil.example"
CLIENT = httpx.Client(timeout=DEADLINE, headers={"user-agent": BROWSER})
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_origins_have_no_effect(served: Served, site: str) -> None:
    marked = {"sec-fetch-site": site}
    for path in ("/v1/completions", "/v1/messages", "/api/chat", "/v1/models/unload", "/v1/load_lora_adapter"):
        assert CLIENT.post(served.url + path, json=BODY, headers=marked).status_code == 403
    assert CLIENT.delete(served.url + "/v1/responses/a", headers=marked).status_code == 403
    response = CLIENT.get(served.url + "/watch?seconds=0", headers=marked)
    assert "--allowed-origins" in check_error(response, 403, None, "origin_not_allowed")["message"]
    for path in ("/", "/v1/models", "/health"):  # links to the page, and requests without an effect
        assert CLIENT.get(served.url + path, headers=marked).status_code == 200


@pytest.mark.parametrize("site", ["same-origin", "none", None])
def test_the_page_and_the_address_bar_may_do_all(served: Served, site: str | None) -> None:
    marked = {FROM_OWN_PAGE: "1"} if site is None else {"sec-fetch-site": site}
    assert CLIENT.post(served.url + "/v1/completions", json=BODY, headers=marked).status_code == 200
    assert CLIENT.get(served.url + "/watch?seconds=0", headers=marked).status_code == 200


def test_programs_send_no_marks(served: Served) -> None:
    assert httpx.post(served.url + "/v1/completions", json=BODY).status_code == 200
    assert httpx.get(served.url + "/watch?seconds=0").status_code == 200


@pytest.mark.parametrize("headers", [{}, {"origin": ORIGIN}, {"origin": "null"}])
def test_a_browser_without_marks_does_not_watch(served: Served, headers: dict[str, str]) -> None:
    """Browsers do not mark requests to other machines without TLS."""
    assert CLIENT.get(served.url + "/watch?seconds=0", headers=headers).status_code == 403


def test_page_script_sends_the_own_page_header() -> None:
    assert f'"{FROM_OWN_PAGE}"' in (STATIC / "js/api.js").read_text()


@pytest.mark.parametrize(("given", "allowed"), [("*", "*"), (f"{ORIGIN}/", ORIGIN)])
def test_allowed_origins(given: str, allowed: str) -> None:
    marked = {"sec-fetch-site": "cross-site", "origin": ORIGIN}
    key, other = {"authorization": "Bearer k"}, {**marked, "origin": "https://other.example"}
    with serve(args=ServerArgs(allowed_origins=(given,), api_key=("k",), shutdown_timeout=1)) as served:
        url = served.url + "/v1/completions"
        response = CLIENT.post(url, json=BODY, headers=marked | key)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == allowed
        assert "x-generation-id" in response.headers["access-control-expose-headers"]
        assert CLIENT.post(url, json=BODY, headers=other | key).status_code == (200 if allowed == "*" else 403)
        response = CLIENT.post(url, json=BODY, headers=marked)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, allowed)
        asked = {"access-control-request-method": "POST"}
        preflight, others = (CLIENT.options(url, headers=asked | {"origin": o}) for o in (ORIGIN, other["origin"]))
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, allowed)
        assert ("access-control-allow-origin" in others.headers) == (allowed == "*")


def test_cors_allows_no_origin_by_default(served: Served) -> None:
    response = CLIENT.get(served.url + "/v1/models", headers={"origin": "http://localhost:3000"})
    assert "access-control-allow-origin" not in response.headers


def test_refused_cross_site_viewers_do_not_use_viewer_slots(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for i in range(MAX_VIEWERS):
            headers = {"sec-fetch-site": "cross-site", "host": f"x{i}.localhost:8000"}
            assert stack.enter_context(CLIENT.stream("GET", served.url + "/watch", headers=headers)).status_code == 403
        assert CLIENT.get(served.url + "/watch?seconds=0", headers={"sec-fetch-site": "same-origin"}).status_code == 200
