"""Many concurrent clients, some of which disconnect: no token is lost, doubled or mixed up, and no state remains."""

from __future__ import annotations

import asyncio
import random

import httpx
import openai
import pytest

from tests.support.serving import MODEL, Served, serve, wait_until
from tools.fixtures.fake_engine import fake_config, generated


def prompt_of(i: int) -> str:
    return f"stream {i}: " + "x" * (i * 7 % 120)


def expected_text(served: Served, prompt: str, num_tokens: int) -> str:
    return "".join(map(chr, generated(served.tokenizer.encode(prompt), num_tokens)))


@pytest.mark.parametrize("num_blocks", [512, 60])  # 60 blocks are far too few, so that requests are preempted
def test_concurrent_streams(num_blocks: int) -> None:
    config = fake_config(num_blocks=num_blocks, max_num_batched_tokens=61)
    with serve(config=config) as served:

        async def stream_one(client: object, i: int) -> str:
            stream = await client.completions.create(  # type: ignore[attr-defined]
                model=MODEL, prompt=prompt_of(i), max_tokens=50 + i, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def stream_all() -> list[str]:
            async with served.async_client() as client:
                return await asyncio.gather(*(stream_one(client, i) for i in range(32)))

        for i, text in enumerate(asyncio.run(stream_all())):
            assert text == expected_text(served, prompt_of(i), 50 + i)
        served.wait_until_idle()
        assert (served.engine.stats.num_preemptions > 0) == (num_blocks == 60)


def test_half_of_the_clients_disconnect() -> None:
    """Clients disconnect at random points: before the response, after its headers, or after any number of events.

    Disconnecting clients request so many tokens that generating all tokens would exceed the time limit of the test.
    """
    rng = random.Random(20250)
    num_tokens, endless = 60, 50_000
    config = fake_config(num_blocks=7000, max_num_seqs=40, max_model_len=endless + 200)
    with serve(config=config, step_time=0.001) as served:

        async def stay(client: httpx.AsyncClient, i: int) -> str:
            body = {"prompt": prompt_of(i), "max_tokens": num_tokens}
            response = await client.post("/v1/completions", json={**body, "stream": i % 4 != 0})
            if i % 4 == 0:
                return response.json()["choices"][0]["text"]
            events = response.text.strip().split("\n\n")
            assert events.pop() == "data: [DONE]"
            return "".join(httpx.Response(200, text=e[6:]).json()["choices"][0]["text"] for e in events)

        async def leave(client: httpx.AsyncClient, i: int, num_chunks: int) -> None:
            body = {"prompt": prompt_of(i), "max_tokens": endless, "stream": True}
            if i % 8 == 1:
                body["prompt"] = [prompt_of(i), prompt_of(i + 1), prompt_of(i + 2)]
            async with client.stream("POST", "/v1/completions", json=body) as response:
                chunks = response.aiter_raw()
                for _ in range(num_chunks):
                    await anext(chunks, b"")

        async def leave_early(client: httpx.AsyncClient, i: int, delay: float) -> None:
            task = asyncio.create_task(leave(client, i, num_tokens))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def run() -> list[str | None]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=60) as client:
                clients = []
                for i in range(100):
                    if i % 2 == 0:
                        clients.append(stay(client, i))
                    elif i % 10 == 1:
                        clients.append(leave_early(client, i, rng.uniform(0, 0.05)))
                    else:
                        clients.append(leave(client, i, rng.randrange(num_tokens)))
                return await asyncio.gather(*clients)

        for i, text in enumerate(asyncio.run(run())):
            if text is not None:
                assert text == expected_text(served, prompt_of(i), num_tokens)
        served.wait_until_idle()


BODIES = [
    {"prompt": "alone"},
    {"prompt": ["one", "two", "three"]},
    {"prompt": "alone", "stream": True},
    {"prompt": ["one", "two", "three"], "stream": True},
]


@pytest.mark.parametrize("body", BODIES)
def test_disconnect_aborts_at_once(body: dict[str, object]) -> None:
    """The abort works even before the first token: the engine is stopped in its first step."""
    with serve() as served:
        served.runner.running.clear()
        num_prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1

        async def ask_and_leave() -> None:
            async with httpx.AsyncClient(base_url=served.url) as client:
                task = asyncio.create_task(client.post("/v1/completions", json={**body, "max_tokens": 400}))
                await asyncio.to_thread(
                    wait_until,
                    lambda: served.engine.num_open_requests == num_prompts and served.runner.has_arrived,
                    "the request",
                )
                # Otherwise the abort could find the request in the inbox, and no step would run.
                await asyncio.to_thread(wait_until, lambda: served.engine.stats.num_running >= 1, "the request to run")
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run(ask_and_leave())
        wait_until(lambda: served.engine.num_open_requests == 0, "the abort")
        assert served.runner.num_steps == 0
        served.runner.running.set()
        served.wait_until_idle()
        assert served.runner.num_steps == 1


def test_a_server_that_stops_ends_its_streams() -> None:
    with serve(step_time=0.01) as served:
        stream = served.client().completions.create(model=MODEL, prompt="a", max_tokens=500, stream=True)
        next(iter(stream))
        asyncio.run_coroutine_threadsafe(served.server.stop(), served.loop)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        wait_until(lambda: served.engine.num_open_requests == 0, "open requests")
        wait_until(lambda: not served.core.has_requests, "requests in the engine")
        assert served.engine.error is None
