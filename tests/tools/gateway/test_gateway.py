"""The real gateway in front of servers: every API passes through, and no response is lost when a server fails."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.gateway import (
    FakeServer,
    ask,
    ask_while,
    before,
    before_pair,
    expected,
    prompts,
    servers_with_known_load,
    wait_for_servers,
)
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tests.tools.disagg.test_proxy import seen_by
from tools.fixtures.fake_engine import byte_ids, fake_config
from tools.fixtures.ports import free_port

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@dataclass
class Fleet:
    url: str
    servers: tuple[Served, Served]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)

    @property
    def server(self) -> Served:
        """One of the servers, for requests without the gateway."""
        return self.servers[0]

    def wait_until_idle(self) -> None:
        for server in self.servers:
            wait_until(lambda one=server: one.engine.num_open_requests == 0, "open requests")  # type: ignore[misc]


@pytest.fixture(scope="module")
def _fleet() -> Iterator[Fleet]:
    with serve() as a, serve() as b, before([a.url, b.url]) as url:
        yield Fleet(url, (a, b))


@pytest.fixture
def fleet(_fleet: Fleet) -> Iterator[Fleet]:
    yield _fleet
    _fleet.wait_until_idle()


def test_openai_clients(fleet: Fleet) -> None:
    """Chats, completions and responses, whole and streamed, equal the server's own responses."""
    direct, through = fleet.server.client(), fleet.openai
    chat: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    wanted = direct.chat.completions.create(**chat)
    answer = through.chat.completions.create(**chat)
    assert answer.choices == wanted.choices and answer.usage is not None
    chunks = list(through.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == wanted.choices[0].message.content and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12

    completion: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 12, "temperature": 0}
    wanted_text = direct.completions.create(**completion).choices[0].text
    assert through.completions.create(**completion).choices[0].text == wanted_text
    assert "".join(c.choices[0].text for c in through.completions.create(**completion, stream=True)) == wanted_text

    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 12, "temperature": 0}
    assert through.responses.create(**asked).output_text == text
    events = list(through.responses.create(**asked, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert MODEL in [model.id for model in through.models.list()]


def test_anthropic_clients(fleet: Fleet) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12}
    (wanted,) = anthropic.Anthropic(base_url=fleet.server.url, api_key="none").messages.create(**asked).content
    (block,) = fleet.anthropic.messages.create(**asked).content
    assert block == wanted and block.type == "text"
    with fleet.anthropic.messages.stream(**asked) as stream:
        assert stream.get_final_text() == block.text
    counted = fleet.anthropic.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert counted.input_tokens == len(fleet.server.tokenizer.apply_chat_template(MESSAGES))


def test_the_model_must_be_named(fleet: Fleet) -> None:
    """The servers accept a request without a model. The gateway cannot route it."""
    answer = httpx.post(f"{fleet.url}/v1/completions", json={"prompt": "a"}, timeout=DEADLINE)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
    with pytest.raises(openai.NotFoundError):
        fleet.openai.completions.create(model="other", prompt="a")


def test_loads_reach_the_gateway(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.runner.running.clear()
    asking = threading.Thread(
        target=lambda: fleet.openai.completions.create(model=MODEL, prompt="a" * 20, max_tokens=2)
    )
    asking.start()

    def seen() -> bool:
        loads = httpx.get(f"{fleet.url}/get_loads", timeout=DEADLINE).json()["loads"]
        running = [load for load in loads if load["num_running_reqs"]]
        return [load["num_running_reqs"] for load in running] == [1] and running[0]["token_usage"] > 0

    try:
        wait_until(seen, "the gateway to read the load")
    finally:
        for server in fleet.servers:
            server.runner.running.set()
        asking.join()


# --- the same conversation, the same server ---


def hit_rate(url: str, name: str, *, users: int, turns: int) -> float:
    """Return the share of cached prompt tokens in conversations whose users take turns in random order."""
    order = [user for user in range(users) for _ in range(turns)]
    random.Random(0).shuffle(order)
    talk = {user: f"{name}{user:03}" + "0123456789" * 6 for user in range(users)}
    num_tokens = num_cached = 0
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for user in order:
        answer = client.completions.create(model=MODEL, prompt=talk[user], max_tokens=8, temperature=0)
        num_tokens += answer.usage.prompt_tokens
        num_cached += answer.usage.prompt_tokens_details.cached_tokens or 0
        talk[user] += "9876543210" * 2
    return num_cached / num_tokens


def test_gateway_hit_rate_is_close_to_the_hit_rate_of_one_server(fleet: Fleet) -> None:
    """The gateway's hit rate is close to the maximum, which a single server with all requests reaches."""
    possible = hit_rate(fleet.server.url, "a", users=8, turns=4)
    assert possible > 0.5
    assert hit_rate(fleet.url, "b", users=8, turns=4) >= possible - 0.02


# --- servers come and go ---


def check(answers: list[tuple[str, httpx.Response]], num_tokens: int) -> None:
    """Check that every response is successful and right."""
    lost = [answer.text for _, answer in answers if answer.status_code != 200]
    assert not lost, f"{len(lost)} of {len(answers)} lost: {lost[0]}"
    for text, answer in answers:
        assert answer.json()["choices"][0]["text"] == expected(text, num_tokens)


def end_of_a_cut_stream(url: str, servers: list[FakeServer]) -> tuple[FakeServer, list[str]]:
    """Kill the server of a running stream. Return the server and the stream's last lines."""
    body = {"model": "fake", "prompt": "stream", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE) as stream:
        lines = stream.iter_lines()
        next(lines)
        (serving,) = [server for server in servers if server.num_open]
        serving.kill()
        rest = [line for line in lines if line]
    return serving, rest[-2:]


@pytest.mark.full
@pytest.mark.parametrize("checks", ["find_it_dead", "miss_it"])
def test_no_response_is_lost_when_servers_start_die_or_shut_down(checks: str) -> None:
    """One server starts late, one is killed under load, and one is shut down under load. No whole response is lost.

    The killed server is restarted and used again. In one case, the gateway's health checks find it dead first. In the
    other, it is back before the next check, as a server whose model loads within seconds: the gateway then only sees
    failed requests.
    """
    num_requests, num_tokens, at_once = 200, 30, 32
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    # three failed checks mark a server as dead
    rare = ["--health-check-interval-secs", "60"] if checks == "miss_it" else []
    with ExitStack() as stack:

        def start(port: int) -> FakeServer:
            server = FakeServer.begin(port, step_time=0.002)
            stack.callback(server.kill)
            return server.wait()

        first = start(ports[0])
        url = stack.enter_context(before(urls, *rare, num_ready=1))
        check([(text, ask(url, text, num_tokens)) for text in prompts(5, "alone")], num_tokens)

        second = start(ports[1])
        wait_for_servers(url, [first, second])
        num_before = first.num_finished

        def share() -> None:
            def is_fair() -> bool:
                at_second = second.num_finished
                return at_second >= 20 and 2 * at_second >= first.num_finished - num_before

            wait_until(is_fair, "the later one to get its share")

        check(ask_while(url, "shared", 40, num_tokens, at_once=8, do=share), num_tokens)

        def kill_first() -> None:
            # More consecutive failures would make the gateway's circuit breaker exclude the server for 60 s.
            wait_until(lambda: first.num_open >= 10, "requests to lose")
            first.kill()
            wait_until(lambda: servers_with_known_load(url) == [second.url], "the gateway to miss its metrics")

        check(ask_while(url, "killed", num_requests, num_tokens, at_once=at_once, do=kill_first), num_tokens)

        if checks == "find_it_dead":
            wait_for_servers(url, [second])
        first = start(ports[0])
        wait_for_servers(url, [first, second])
        wait_until(lambda: servers_with_known_load(url) == sorted(urls), "the gateway to read its metrics again")

        def drain_second() -> None:
            wait_until(lambda: second.num_open > 0, "requests to finish")
            second.popen.send_signal(signal.SIGTERM)

        check(ask_while(url, "ended", num_requests, num_tokens, at_once=at_once, do=drain_second), num_tokens)
        assert second.end() == 0

        _, last = end_of_a_cut_stream(url, [first])
        assert "stream_error" in last[0] and last[1] == "data: [DONE]", (
            "docs/several-macs.md says how a cut stream ends"
        )


# --- prefill and decode ---


def test_the_gateway_passes_kv_transfer_params_from_prefill_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway requests one token from the producer, then all tokens from the consumer, with the flag to load KV."""
    producer, consumer = (replace(fake_config(), kv_role=role) for role in ("kv_producer", "kv_consumer"))
    with (
        serve(config=producer) as prefill,
        serve(config=consumer) as decode,
        before_pair(prefill.url, decode.url) as url,
    ):
        at_prefill, at_decode = seen_by(prefill, monkeypatch), seen_by(decode, monkeypatch)
        for path, prompt in (
            ("/v1/completions", {"prompt": "0123456789" * 4}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
        ):
            body = {"model": MODEL, **prompt, "max_tokens": 7, "ignore_eos": True}
            answer = httpx.post(f"{url}{path}", json=body, timeout=DEADLINE)
            assert answer.json()["usage"]["completion_tokens"] == 7, answer.text
        prefill.wait_until_idle()
        decode.wait_until_idle()
    assert [request.max_tokens for request in at_prefill] == [1, 1]
    assert [request.max_tokens for request in at_decode] == [7, 7]
    assert all(request.options.do_remote_prefill for request in at_decode)
    assert at_decode[0].token_ids[:40] == byte_ids("0123456789" * 4)
