"""`/docs` loads no other file, docs/api.md has the endpoints and parameters of the server; HEAD requests of probes."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from metal_engine.server.embeddings.protocol import EmbeddingBody, RerankBody, ScoreBody
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody
from tests.server.page.test_files import Page
from tests.support.raw_http import crowd, get, rest
from tests.support.serving import Served, serve

# Pages and an endless stream. Programs that try every path of the schema would wait for the stream.
OUTSIDE_THE_SCHEMA = {"/docs", "/openapi", "/json", "/watch"}
TEXT = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text(encoding="utf-8")


def test_docs_have_every_path_field_and_type(served: Served) -> None:
    response = httpx.get(served.url + "/docs")
    page = Page(response)
    assert not page.tags & {"script", "link", "img", "iframe", "form", "object"} and not page.loaded
    assert "//" not in "".join(page.links) and "@import" not in response.text and "url(" not in response.text
    schema = httpx.get(served.url + "/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in page.text
    components = schema["components"]["schemas"]
    assert set(page.ids) == set(components)
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= set(page.ids)
    for one in components.values():
        assert all(name in page.text for name in one.get("properties", {}))
    assert re.search(
        r"prompt\s*string or list of string or list of integer or list of list of integer\s*required", page.text
    )
    assert httpx.get(served.url + "/redoc").text == response.text


def test_every_endpoint_is_on_the_page(served: Served) -> None:
    paths = httpx.get(served.url + "/openapi.json").json()["paths"]
    section = TEXT[TEXT.index("## Endpoints") : TEXT.index("### Streams")]
    documented = set(re.findall(r"(/[\w/{}]+)", section)) - OUTSIDE_THE_SCHEMA
    assert {re.sub(r"{\w+(:path)?}", "{id}", path) for path in paths} == documented


def test_every_parameter_is_on_the_page() -> None:
    names = set(re.findall(r"`(\w+)`", TEXT[TEXT.index("## Parameters") : TEXT.index("## Errors")]))
    bodies = (CompletionBody, ChatCompletionBody, EmbeddingBody, RerankBody, ScoreBody)
    declared = {name for body in bodies for name in body.model_fields} - {"model", "prompt", "messages"}
    assert declared <= names, declared - names


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/ready", "/v1/models", "/version", "/metrics"])
def test_head_has_the_status_and_no_body(served: Served, path: str) -> None:
    head = httpx.head(served.url + path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == httpx.get(served.url + path).headers["content-type"]
    # The next bytes of the connection are the next response, without a body of this one.
    requests = get(path.encode()).replace(b"GET", b"HEAD") + get(b"/version", b"Connection: close\r\n")
    with crowd(served.url, 1, requests) as (connection,):
        first, _, second = rest(connection).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200") and second.startswith(b"HTTP/1.1 200")


def test_head_while_draining() -> None:
    with serve() as served:
        served.server._lifecycle.draining = True
        for path in ("/health", "/ready"):
            assert httpx.head(served.url + path).status_code == 503
        assert httpx.get(served.url + "/ready").json() == {"ready": False}
