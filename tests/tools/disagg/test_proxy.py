"""Proxy in front of a prefill and a decode server: the requests to both servers, and the client's response."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import uvicorn

from metal_engine.request import Request
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tools.disagg.proxy import EndingResponse, create_app, prefill_body
from tools.fixtures.fake_engine import byte_ids, generated
from tools.fixtures.ports import free_port

PROMPT = "0123456789" * 4
EXPECTED = bytes(generated(byte_ids(PROMPT), 12)).decode()


@contextmanager
def proxying(prefill: str, decode: str) -> Iterator[str]:
    config = uvicorn.Config(create_app(prefill, decode), host="127.0.0.1", port=free_port(), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        wait_until(lambda: server.started, "the proxy to start")
        yield f"http://127.0.0.1:{config.port}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE)


def seen_by(served: Served, monkeypatch: pytest.MonkeyPatch, after: list[Request] | None = None) -> list[Request]:
    """Return the list of requests at a server's scheduler. The first is held until ``after`` contains a request.

    Without this wait, a decode server that does not load KV could finish before the prefill server gets the request.
    """
    requests: list[Request] = []
    scheduler = served.core.scheduler
    add = scheduler.add_request

    def see(request: Request) -> None:
        wait_until(lambda: after is None or bool(after), "the other server to be asked")
        requests.append(request)
        add(request)

    monkeypatch.setattr(scheduler, "add_request", see)
    return requests


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def complete(url: str, **body: Any) -> Any:
    return client(url).completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, **body)


@pytest.mark.parametrize("stream", [False, True])
def test_the_proxy_sends_a_one_token_prefill_and_the_full_request(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serve() as prefill, serve() as decode, proxying(prefill.url, decode.url) as url:
        at_prefill = seen_by(prefill, monkeypatch)
        at_decode = seen_by(decode, monkeypatch, after=at_prefill)
        if stream:
            chunks = list(complete(url, stream=True, stream_options={"include_usage": True}))
            text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        else:
            text = complete(url).choices[0].text
        assert text == EXPECTED
        prefill.wait_until_idle()
        decode.wait_until_idle()
        (a,), (b,) = at_prefill, at_decode
        assert a.max_tokens == 1 and a.options.do_remote_decode and not a.options.do_remote_prefill
        assert b.max_tokens == 12 and b.options.do_remote_prefill and not b.options.do_remote_decode
        assert a.token_ids[: a.num_prompt_tokens] == b.token_ids[: b.num_prompt_tokens] == byte_ids(PROMPT)


def test_chats_and_models_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as prefill, serve() as decode, proxying(prefill.url, decode.url) as url:
        at_prefill = seen_by(prefill, monkeypatch)
        seen_by(decode, monkeypatch, after=at_prefill)
        messages: list[Any] = [{"role": "user", "content": PROMPT}]
        answer = client(url).chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=5, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 5
        assert [model.id for model in client(url).models.list()] == [MODEL]
        assert httpx.get(f"{url}/health").json().keys() == {"prefill", "decode"}
        prefill.wait_until_idle()
        assert at_prefill[0].max_tokens == 1


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as served:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
        with proxying(served.url, served.url) as url:
            assert httpx.get(f"{url}/health", trust_env=False).json()["decode"]["status"] != "error"


def test_the_proxy_retries_decode_without_kv_if_the_prefill_server_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as decode, proxying(f"http://127.0.0.1:{free_port()}", decode.url) as url:
        at_decode = seen_by(decode, monkeypatch)
        scheduler = decode.core.scheduler
        add = scheduler.add_request

        def lose(request: Request) -> None:
            """Remove a request that waits for KV from the queue. It then waits until the abort."""
            add(request)
            if request.options.do_remote_prefill:
                scheduler.admissions.waiting.remove(request.request_id)
                scheduler.admissions.loading[request.request_id] = request

        monkeypatch.setattr(scheduler, "add_request", lose)
        assert complete(url).choices[0].text == EXPECTED
        assert [request.options.do_remote_prefill for request in at_decode] in ([True, False], [False])
        decode.wait_until_idle()


def test_errors_come_from_the_decode_server() -> None:
    with serve() as prefill, serve() as decode, proxying(prefill.url, decode.url) as url:
        direct = decode.post("/v1/completions", {"prompt": PROMPT, "max_tokens": -1})
        through = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": -1})
        assert (through.status_code, through.json()) == (400, direct.json())
        for content in ("no JSON", "[]"):
            answer = httpx.post(f"{url}/v1/completions", content=content)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    with serve() as prefill, proxying(prefill.url, f"http://127.0.0.1:{free_port()}") as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT}, timeout=DEADLINE)
        assert answer.status_code == 502 and "decode server" in answer.json()["error"]["message"]
        prefill.wait_until_idle()


def test_a_client_that_leaves_ends_both() -> None:
    with serve(step_time=0.01) as prefill, serve(step_time=0.01) as decode, proxying(prefill.url, decode.url) as url:
        stream = client(url).completions.create(model=MODEL, prompt=PROMPT, max_tokens=400, stream=True, temperature=0)
        next(iter(stream))
        stream.close()
        prefill.wait_until_idle()
        decode.wait_until_idle()
        assert decode.runner.num_steps < 400


def test_a_client_that_leaves_before_the_answer_begins_ends_both() -> None:
    with serve(step_time=0.01) as prefill, serve(step_time=0.01) as decode, proxying(prefill.url, decode.url) as url:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as leaving:
            leaving.sendall(head.encode() + body)
            wait_until(lambda: decode.runner.num_steps > 0, "the answer's first step")
        prefill.wait_until_idle()
        decode.wait_until_idle()
        assert 0 < decode.runner.num_steps < 400


def test_prefill_requests_ask_for_exactly_one_token() -> None:
    body = {
        "prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20,
        "max_completion_tokens": 30, "min_tokens": 5, "n": 3, "best_of": 3, "temperature": 0.5,
    }  # fmt: skip
    asked = {"prompt": PROMPT, "max_tokens": 1, "max_completion_tokens": 1, "temperature": 0.5}
    assert prefill_body(body) == asked | {"kv_transfer_params": {"do_remote_decode": True}}
    assert prefill_body({"prompt": PROMPT})["max_tokens"] == 1


def test_a_client_that_has_gone_before_the_first_chunk_ends_the_exchange() -> None:
    ended = False

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"

    async def end() -> None:
        nonlocal ended
        ended = True

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        await asyncio.sleep(0)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(EndingResponse(chunks(), 200, {}, end)(scope, receive, send))
    assert ended
