"""Ollama asks for no Content-Type, and LiteLLM sends it none; what a browser sends for a page needs one."""

from __future__ import annotations

import json

import httpx

from tests.support.serving import DEADLINE, Served

BODY = {"messages": [{"role": "user", "content": "a"}], "stream": False, "max_tokens": 1}


def status(served: Served, path: str, **headers: str) -> int:
    content = json.dumps({**BODY, "options": {"num_predict": 1}} if path.startswith("/api/") else BODY)
    return httpx.post(served.url + path, content=content.encode(), headers=headers, timeout=DEADLINE).status_code


def test_a_body_needs_no_type(served: Served) -> None:
    assert status(served, "/api/chat") == 200
    assert status(served, "/api/chat", **{"content-type": "application/json", "origin": "null"}) == 200


def test_but_of_a_page(served: Served) -> None:
    assert status(served, "/api/chat", origin="null") == 400
    assert status(served, "/api/chat", **{"content-type": "text/plain"}) == 400
    assert status(served, "/v1/chat/completions") == 400
