"""Requests refused before they reach a route: callers without the key, and bodies that are too large."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import openai
import pytest

from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.serving import DEADLINE, MODEL, Served, serve
from tools.fixtures.fake_engine import Death

KEY = "sk-sesame"
OTHER_KEY = "sk-open"
MAX_BODY = 10_000


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with serve(args=ServerArgs(api_key=(KEY, OTHER_KEY), max_body_size=MAX_BODY, strict_params=True)) as served:
        yield served


def auth(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [
    {},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": "Bearer"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": "Bearer \xff"},
    {"x-api-key": f"Bearer {KEY}"},
    {"x-api-key": OTHER_KEY[:-1]},
    {"authorization": f"Bearer {KEY},{OTHER_KEY}"},
    {"authorization": "Bearer none", "x-api-key": "none"},
])  # fmt: skip
def test_without_the_key(guarded: Served, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
        response = httpx.request(method, guarded.url + path, headers=raw)
        error = check_error(response, 401, None, "invalid_api_key")
        assert KEY not in error["message"] and response.headers["www-authenticate"] == "Bearer"


def test_with_the_key(guarded: Served) -> None:
    assert httpx.get(guarded.url + "/health").status_code == 200
    for key in (KEY, OTHER_KEY):
        for headers in (
            {"authorization": f"bearer {key}"},
            {"x-api-key": key},
            {"authorization": "Bearer none", "x-api-key": key},
            {"authorization": f"Bearer {key}", "x-api-key": "none"},
        ):
            assert httpx.get(guarded.url + "/v1/models", headers=headers).status_code == 200
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
    assert client.completions.create(model=MODEL, prompt="a").model == MODEL
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="other", max_retries=0).models.list()


def test_health_shows_the_engine_error_only_to_clients_with_the_key() -> None:
    with serve(args=ServerArgs(api_key=(KEY,))) as served:
        served.runner.raise_next = Death("of /a/path")
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(served.url + "/v1/completions", json=body, headers=auth()).status_code == 503
        for headers, told in (({}, "the engine has stopped"), (auth(), "the engine has stopped: Death('of /a/path')")):
            response = httpx.get(served.url + "/health", headers=headers)
            assert response.status_code == 503 and response.json()["error"] == told


def test_unknown_names_are_refused_when_strict(guarded: Served) -> None:
    def post(path: str = "/v1/completions", **body: object) -> httpx.Response:
        return httpx.post(guarded.url + path, json=body, headers=auth())

    def chat(**fields: object) -> httpx.Response:
        return post("/v1/chat/completions", messages=[{"role": "user", "content": "a", **fields}], max_tokens=1)

    error = check_error(post(prompt="a", temprature=1.0), 400, "temprature", "unknown_parameter")
    assert "temprature" in error["message"]
    wrong = post(prompt="a", stream=True, stream_options={"usage": 1})
    check_error(wrong, 400, "stream_options.usage", "unknown_parameter")
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    check_error(chat(cotnent="b"), 400, "messages.cotnent", "unknown_parameter")
    check_error(chat(content=[part]), 400, "messages.content.cache_control", "unknown_parameter")
    check_error(post("/v1/embeddings", input="a", made_up=1), 400, "made_up", "unknown_parameter")
    for path, tokens in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [65]})):
        assert post(path, **tokens).status_code == 200
        check_error(post(path, **tokens, made_up=1), 400, "made_up", "unknown_parameter")
    assert httpx.get(guarded.url + "/health").json()["unknown_parameters"] == {}
    known = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "n": 1, "temprature": None}
    # Fields of an answer that a client sends back.
    answered = chat(refusal=None, annotations=[], audio=None, function_call=None)
    for accepted in (post(prompt="a", **known), answered, post("/v1/embeddings", input="a", user="me")):
        assert accepted.status_code == 200, accepted.text


def body_of(num_bytes: int) -> bytes:
    start, end = b'{"prompt": "a", "max_tokens": 1, "user": "', b'"}'
    return start + b"x" * (num_bytes - len(start) - len(end)) + end


def test_the_largest_body(guarded: Served) -> None:
    for num_bytes, status in ((MAX_BODY, 200), (MAX_BODY + 1, 413)):
        for content in (body_of(num_bytes), iter([body_of(num_bytes)[:5000], body_of(num_bytes)[5000:]])):
            headers = {"content-type": "application/json", **auth()}
            response = httpx.post(guarded.url + "/v1/completions", content=content, headers=headers)
            assert response.status_code == status, response.text


def test_expect_100_continue_with_a_too_large_body_gets_a_413(guarded: Served) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        client.sendall(f"{head}Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n".encode())
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(("status", "headers"), [
    (401, {"host": "localhost"}),
    (403, {"host": "evil.example"}),
    (403, {"host": "localhost", "sec-fetch-site": "cross-site"}),
    (503, {"host": "localhost"}),
])  # fmt: skip
def test_a_body_sent_after_a_refusal_does_not_reset_the_connection(
    guarded: Served, served: Served, status: int, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server._lifecycle, "draining", status == 503)
    host, port = (guarded if status == 401 else served).url.removeprefix("http://").split(":")
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{''.join(lines)}Content-Length: 20000\r\n\r\n".encode())
        answer = client.recv(1)
        for _ in range(2):
            client.sendall(b"x" * 10_000)
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(f"HTTP/1.1 {status}".encode()) and b"connection: close" in answer


def test_unknown_parameters_are_counted(served: Served) -> None:
    """An unknown field of several messages counts once a request."""
    before = httpx.get(served.url + "/health").json()["unknown_parameters"].get("temprature", 0)
    messages = [{"role": "user", "content": "a", "mood": "good"}] * 3
    for _ in range(3):
        assert served.post("/v1/completions", {"prompt": "a", "temprature": 1.0}).status_code == 200
        assert served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).status_code == 200
    counts = httpx.get(served.url + "/health").json()["unknown_parameters"]
    assert (counts["temprature"], counts["messages.mood"]) == (before + 3, 3)


def test_unknown_parameter_names_are_shown_only_with_the_key() -> None:
    with serve(args=ServerArgs(api_key=(KEY,), shutdown_timeout=1)) as served:
        for name in ("secret_a", "secret_a", "secret_b"):
            body = {"prompt": "a", "max_tokens": 1, name: 1}
            assert httpx.post(served.url + "/v1/completions", json=body, headers=auth()).status_code == 200
        for headers in ({}, auth("wrong"), {"x-api-key": "wrong"}):
            response = httpx.get(served.url + "/health", headers=headers)
            assert "secret" not in response.text
            assert (response.json()["num_unknown_parameters"], response.json()["unknown_parameters"]) == (3, {})
        names = httpx.get(served.url + "/health", headers=auth()).json()["unknown_parameters"]
        assert names == {"secret_a": 2, "secret_b": 1}


def test_without_a_key_only_local_clients_see_unknown_parameter_names(served: Served) -> None:
    """A proxy passes the client's address on."""
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "secret_c": 1}).status_code == 200
    for client, sees in [
        ("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("203.0.113.9", False),
        ("::ffff:203.0.113.9", False),
    ]:  # fmt: skip
        response = httpx.get(served.url + "/health", headers={"x-forwarded-for": client})
        assert response.json()["num_unknown_parameters"] >= 1
        assert ("secret_c" in response.text) == bool(response.json()["unknown_parameters"]) == sees


def test_paths_with_extra_slashes_are_not_redirected(served: Served) -> None:
    for path in ("/health/", "/v1/completions/", "/docs/", "//health"):
        for method in ("GET", "POST"):
            response = httpx.request(method, served.url + path, headers={"host": "localhost"})
            assert response.status_code in (404, 405) and "location" not in response.headers


def test_made_up_names_take_no_memory() -> None:
    with serve() as served:
        for i in range(3):
            names = {f"{'x' * 300}{i}_{j}": 1 for j in range(100)} | {f"name {i} {j}": 1 for j in range(100)}
            assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **names}).status_code == 200
        counts = httpx.get(served.url + "/health").json()["unknown_parameters"]
        assert len(counts) <= 101 and all(len(name) <= 100 for name in counts)
        assert sum(counts.values()) == 600
