"""Content types in Ollama's API: none is required (LiteLLM, curl). Requests that a web page can send need JSON's."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.support.serving import DEADLINE, Served

BODY = {"messages": [{"role": "user", "content": "a"}], "stream": False, "max_tokens": 1}


def status(served: Served, path: str, **headers: str) -> int:
    content = json.dumps({**BODY, "options": {"num_predict": 1}} if path.startswith("/api/") else BODY)
    return httpx.post(served.url + path, content=content.encode(), headers=headers, timeout=DEADLINE).status_code


FORM = "application/x-www-form-urlencoded"


def test_a_body_needs_no_type(served: Served) -> None:
    assert status(served, "/api/chat") == 200
    assert status(served, "/api/chat", **{"content-type": "application/json", "origin": "null"}) == 200


@pytest.mark.parametrize("kind", [FORM, "text/plain", "multipart/form-data", ""])
def test_any_type_will_do(served: Served, kind: str) -> None:
    assert status(served, "/api/chat", **{"content-type": kind}) == 200


@pytest.mark.parametrize("origin", ["null", "https://page.example"])
def test_but_of_a_page(served: Served, origin: str) -> None:
    assert status(served, "/api/chat", origin=origin) == 400
    for kind in (FORM, "text/plain", "multipart/form-data"):
        assert status(served, "/api/chat", **{"content-type": kind, "origin": origin}) == 400


def test_other_endpoints_want_json(served: Served) -> None:
    assert status(served, "/v1/chat/completions") == 400
    assert status(served, "/v1/chat/completions", **{"content-type": FORM}) == 400
