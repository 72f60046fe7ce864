"""Server limits: queues, time, TLS, templates, tokenizers."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvloop
from tokenizers import Regex, pre_tokenizers

from metal_engine.errors import ConfigError
from metal_engine.server.generation.streaming import KEEP_ALIVE
from metal_engine.server.listen import tls_options
from metal_engine.settings.config import PoolerConfig
from metal_engine.settings.server_args import ServerArgs
from tests.server.status.test_metrics import scrape
from tests.server.test_errors import check_error, sse_events
from tests.support import tls
from tests.support.raw_http import crowd, rest
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tools.fixtures.fake_engine import byte_ids, fake_config, generated, tiny_tokenizer

COMPLETIONS = "/v1/completions"


def hold(served: Served, num_streams: int, prompt: str = "abc") -> list[openai.Stream[Any]]:
    """Return open streams while the engine is stopped in its first step."""
    served.runner.running.clear()
    return [
        served.client().completions.create(model=MODEL, prompt=prompt, max_tokens=5, stream=True)
        for _ in range(num_streams)
    ]


def finish(served: Served, streams: list[openai.Stream[Any]]) -> None:
    served.runner.running.set()
    for stream in streams:
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    served.wait_until_idle()


def test_a_full_queue() -> None:
    with serve(config=fake_config(max_num_seqs=2), args=ServerArgs(max_num_queued_reqs=3)) as served:
        streams = hold(served, 1)
        wait_until(lambda: served.engine.stats.num_running == 1, "one to run")
        streams += hold(served, 3)
        wait_until(lambda: served.engine.num_waiting == 3, "three to wait")
        messages = {"messages": [{"role": "user", "content": "d"}]}
        for stream in (False, True):
            for path, body in [
                (COMPLETIONS, {"prompt": "d"}), ("/v1/chat/completions", messages), ("/v1/responses", {"input": "d"}),
            ]:  # fmt: skip
                response = served.post(path, {**body, "stream": stream})
                error = check_error(response, 503, code="overloaded")
                assert "--max-num-queued-reqs" in error["message"] and response.headers["retry-after"] == "1"
        response = served.post("/v1/messages", {"model": MODEL, "max_tokens": 1, **messages})
        assert response.status_code == 503 and response.json()["error"]["type"] == "overloaded_error"
        assert scrape(served)["requests_rejected_total"]["overloaded",] == 7
        finish(served, streams)
        assert served.post(COMPLETIONS, {"prompt": "d"}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_a_request_with_many_prompts_does_not_fill_the_queue(path: str) -> None:
    """A request with many prompts does not fill the queue, and a later request does not wait for all prompts."""
    num_prompts = 60
    config = fake_config(max_num_seqs=2, pooler=PoolerConfig(is_embedder=True))
    with serve(config=config, args=ServerArgs(max_num_queued_reqs=12)) as served, ThreadPoolExecutor() as pool:
        served.runner.running.clear()
        many = ["abc"] * num_prompts
        body = {"prompt": many, "max_tokens": 9} if path == COMPLETIONS else {"input": many}
        batch = pool.submit(served.post, path, body)
        wait_until(lambda: served.engine.num_waiting + served.engine.stats.num_running == num_prompts, "all of them")
        (stream,) = hold(served, 1)
        # four prompts of the batch are open too
        wait_until(lambda: served.engine.num_open_requests == 5, "a later one")
        assert served.engine.num_queued <= 2 * 4 + 1
        finish(served, [stream])
        assert len(batch.result().json()["choices" if path == COMPLETIONS else "data"]) == num_prompts
        assert [params.max_tokens for params in served.runner.seen_params].index(5) == 4


def test_too_many_queued_tokens() -> None:
    with serve(args=ServerArgs(max_num_queued_tokens=100)) as served:
        # accepted because no other request is queued
        assert served.post(COMPLETIONS, {"prompt": "x" * 200, "max_tokens": 5}).status_code == 200
        streams = hold(served, 2, "x" * 30)
        wait_until(lambda: served.engine.num_queued_tokens == 60, "both")
        error = check_error(served.post(COMPLETIONS, {"prompt": ["x" * 20, "y" * 21]}), 503, code="overloaded")
        assert "(setting max-num-queued-tokens)" in error["message"]
        streams += hold(served, 1, "x" * 40)
        finish(served, streams)
        assert served.engine.num_queued_tokens == 0


def test_timeout() -> None:
    config = fake_config(max_model_len=100_000, num_blocks=20_000)
    body = {"prompt": ["a", "b"], "max_tokens": 90_000}
    with serve(config=config, step_time=0.005, args=ServerArgs(request_timeout=0.2)) as served:
        assert "--request-timeout" in check_error(served.post(COMPLETIONS, body), 504, code="timeout")["message"]
    # Time for a first event and for a short request on a busy machine.
    with serve(config=config, step_time=0.005, args=ServerArgs(request_timeout=2.0)) as served:
        response = served.post(COMPLETIONS, body | {"stream": True})
        *events, last = sse_events(response.text)
        assert events and last["error"]["code"] == "timeout" and "[DONE]" not in response.text
        served.wait_until_idle()
        assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3}).status_code == 200


def test_a_waiting_stream_sends_sse_keep_alive_comments() -> None:
    """No event is lost between comments, and the official client ignores comments."""
    with serve(args=ServerArgs(sse_keep_alive=0.02)) as served:
        served.runner.running.clear()
        body = {"prompt": "abc", "max_tokens": 5, "stream": True}
        with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=DEADLINE) as response:
            parts = response.iter_raw()
            early = b""
            while early.count(KEEP_ALIVE) < 2:
                early += next(parts)
            assert early == KEEP_ALIVE * early.count(KEEP_ALIVE)
            served.runner.running.set()
            rest = b"".join(parts).replace(KEEP_ALIVE, b"").decode()
        text = "".join(event["choices"][0]["text"] for event in sse_events(rest))
        assert text == "".join(map(chr, generated(byte_ids("abc"), 5)))
        streams = hold(served, 1)
        time.sleep(0.1)
        finish(served, streams)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tls.certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("loop", [None, pytest.param(uvloop.new_event_loop, marks=pytest.mark.full)])
def test_tls_and_half_a_handshake(
    certificate: tuple[Path, Path], loop: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    key, cert = certificate
    args = ServerArgs(
        ssl_keyfile=str(key), ssl_certfile=str(cert), timeout_read=0.5, max_connections=10, shutdown_timeout=1
    )
    with serve(args=args, loop_factory=loop) as served:
        with crowd(served.url, 30, b"\x16\x03\x01\x02\x00") as sockets:
            wait_until(lambda: 0 < len(served.server.connections) <= 10, "room to be made")
            url = served.url.replace("http:", "https:")
            context = ssl.create_default_context(cafile=str(cert))
            assert httpx.get(url + "/health", verify=context).json()["status"] == "ok"
            with pytest.raises(httpx.HTTPError):
                httpx.get(served.url + "/health")
            for one in sockets:
                assert rest(one) == b""
        wait_until(lambda: len(served.server.connections) == 0, "all to be closed")


def test_tls_settings_that_cannot_work(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    key, cert = map(str, certificate)
    for bad in ({"ssl_certfile": cert}, {"ssl_keyfile": key}, {"ssl_ca_certs": cert}):
        with pytest.raises(ConfigError, match="ssl-"):
            ServerArgs(**bad)  # type: ignore[arg-type]
    for bad in (
        {"ssl_certfile": key, "ssl_keyfile": cert},
        {"ssl_certfile": cert, "ssl_keyfile": str(tmp_path / "none")},
    ):
        with pytest.raises(ConfigError, match="--ssl"):
            tls_options(ServerArgs(**bad))  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% for i in range(1000000000) %}{% endfor %}",
])  # fmt: skip
def test_templates_are_in_a_sandbox(template: str) -> None:
    with serve(tokenizer=tiny_tokenizer(template)) as served:
        response = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert "chat template" in check_error(response, 400, "messages")["message"]


def test_overload_is_answered_at_once() -> None:
    """Requests that are admitted but not submitted count too. Otherwise a burst would pass before it is counted."""
    with serve(config=fake_config(max_num_seqs=4), args=ServerArgs(max_num_queued_reqs=8)) as served:
        served.runner.running.clear()

        async def ask(client: httpx.AsyncClient) -> int:
            return (await client.post(COMPLETIONS, json={"prompt": "x" * 50, "max_tokens": 100})).status_code

        async def run() -> list[int]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=DEADLINE) as client:
                answers = [asyncio.create_task(ask(client)) for _ in range(200)]
                async with asyncio.timeout(DEADLINE):
                    while sum(answer.done() for answer in answers) < 188:
                        await asyncio.sleep(0.01)
                served.runner.running.set()
                return await asyncio.gather(*answers)

        statuses = asyncio.run(run())
        assert set(statuses) == {200, 503} and statuses.count(503) >= 188


HOSTILE = "x" * 4000  # slow for a backtracking regular expression


def test_a_text_that_panics_is_a_400_and_the_server_keeps_running() -> None:
    tokenizer = tiny_tokenizer()
    backend = tokenizer.hf_tokenizer.backend_tokenizer
    slow = pre_tokenizers.Split(Regex("(?:x+x+)+y"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([slow, backend.pre_tokenizer])
    with serve(tokenizer=tokenizer) as served:
        for path, body, param in [
            (COMPLETIONS, {"prompt": HOSTILE}, "prompt"),
            (COMPLETIONS, {"prompt": "a", "bad_words": [HOSTILE]}, "bad_words"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": HOSTILE}]}, "messages"),
            ("/v1/responses", {"input": HOSTILE}, "input"),
            ("/v1/embeddings", {"input": HOSTILE}, "input"),
            ("/tokenize", {"prompt": HOSTILE}, "prompt"),
        ]:
            error = check_error(served.post(path, body), 400, param)
            assert "cannot tokenize this text" in error["message"]
            fine = served.post(COMPLETIONS, {"prompt": "xxy", "max_tokens": 2})
            assert fine.status_code == 200 and fine.json()["usage"]["completion_tokens"] == 2
