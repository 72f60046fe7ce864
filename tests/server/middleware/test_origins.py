"""Requests that a page of another origin makes a browser send are refused if they could have an effect."""

from __future__ import annotations

import contextlib

import httpx
import pytest

from metal_engine.server.middleware.origins import FROM_OWN_PAGE
from metal_engine.server.page.files import STATIC
from metal_engine.server.page.viewers import MAX_VIEWERS
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.serving import DEADLINE, Served, serve

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


def test_the_page_sends_its_header() -> None:
    assert f'"{FROM_OWN_PAGE}"' in (STATIC / "js/api.js").read_text()


@pytest.mark.parametrize("allowed", ["*", ORIGIN])
def test_allowed_origins(allowed: str) -> None:
    marked = {"sec-fetch-site": "cross-site", "origin": ORIGIN}
    key, other = {"authorization": "Bearer k"}, {**marked, "origin": "https://other.example"}
    with serve(args=ServerArgs(allowed_origins=(allowed,), api_key=("k",), shutdown_timeout=1)) as served:
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


def test_no_origin_is_allowed_unless_told(served: Served) -> None:
    response = CLIENT.get(served.url + "/v1/models", headers={"origin": "http://localhost:3000"})
    assert "access-control-allow-origin" not in response.headers


def test_no_places_are_taken_under_other_names(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for i in range(MAX_VIEWERS):
            headers = {"sec-fetch-site": "cross-site", "host": f"x{i}.localhost:8000"}
            response = stack.enter_context(CLIENT.stream("GET", served.url + "/watch", headers=headers))
            assert response.status_code == 403
        assert CLIENT.get(served.url + "/watch?seconds=0", headers={"sec-fetch-site": "same-origin"}).status_code == 200
