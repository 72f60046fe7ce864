"""Many streams at once: no token lost or doubled, memory bounded, all cancelled cleanly. More get 503 immediately."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import httpx
import pytest

from metal_engine.request import RequestOutput
from metal_engine.server.generation.generation import _merge
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import Served, serve, wait_until
from tools.fixtures.fake_engine import byte_ids, fake_config

NUM_TOKENS = 40
ENDLESS = 7_000


def next_letter(tokens: list[int], num_prompt_tokens: int) -> int:
    """Return successive letters, starting at a letter that depends on the prompt. Shows lost and doubled tokens."""
    return ord("a") + (sum(tokens[:num_prompt_tokens]) + len(tokens) - num_prompt_tokens) % 26


def prompt_of(i: int) -> str:
    return f"stream {i}"


def expected(i: int, num_tokens: int) -> str:
    start = sum(byte_ids(prompt_of(i)))
    return "".join(chr(ord("a") + (start + k) % 26) for k in range(num_tokens))


class Client:
    """One stream on its own socket. httpx would take longer than the server."""

    def __init__(self, served: Served, i: int, num_tokens: int) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        self._address = host, int(port)
        content = json.dumps({"prompt": byte_ids(prompt_of(i)), "max_tokens": num_tokens, "stream": True}).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            + f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        self.status = 0
        self.text = ""
        self.done = False

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(self._request)
            self.status = int((await reader.readline()).split()[1])
            if self.status != 200:
                return
            async for line in reader:
                if line.startswith(b"data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                self.done |= line.startswith(b"data: [DONE]")
        finally:
            writer.close()


@pytest.mark.parametrize(("num_streams", "num_running"), [(150, 40), pytest.param(500, 128, marks=pytest.mark.full)])
def test_many_streams(num_streams: int, num_running: int) -> None:
    # All running requests could reach their token limit with these blocks, although none does.
    sizes = {"num_blocks": 16_384, "block_size": 64, "max_num_batched_tokens": 1024, "max_model_len": ENDLESS + 100}
    config = fake_config(max_num_seqs=num_running, **sizes)
    with serve(next_letter, config=config, args=ServerArgs(max_num_queued_reqs=num_streams)) as served:
        asyncio.run(_all_finish(served, num_streams))
        served.wait_until_idle()
        asyncio.run(_all_leave(served, num_streams, num_running))


async def _all_finish(served: Served, num_streams: int) -> None:
    clients = [Client(served, i, NUM_TOKENS) for i in range(num_streams)]
    await asyncio.gather(*(client.run() for client in clients))
    for i, client in enumerate(clients):
        assert client.status == 200 and client.done
        assert client.text == expected(i, NUM_TOKENS)


def _num_tokens(clients: list[Client]) -> int:
    return sum(len(client.text) for client in clients)


async def _all_leave(served: Served, num_streams: int, num_running: int) -> None:
    """Start endless streams, more than the queue accepts, then cancel all of them."""
    gc.collect()
    tracemalloc.start()
    clients = [Client(served, i, ENDLESS) for i in range(num_streams + num_running)]
    # The runner is stopped until all have started. Otherwise the first would finish before the last starts.
    served.runner.running.clear()
    tasks = [asyncio.create_task(client.run()) for client in clients[:num_running]]
    await asyncio.to_thread(wait_until, lambda: served.engine.num_open_requests == num_running, "a batch")
    served.runner.running.set()
    await asyncio.to_thread(wait_until, lambda: served.engine.stats.num_running == num_running, "a full batch")
    served.runner.running.clear()
    tasks += [asyncio.create_task(client.run()) for client in clients[num_running:]]
    await asyncio.to_thread(wait_until, lambda: served.engine.num_waiting >= num_streams, "a full queue")
    for i in range(20):
        client = Client(served, i, 1)
        await client.run()
        assert client.status == 503
    served.runner.running.set()
    before = tracemalloc.get_traced_memory()[0]
    lengths = [len(client.text) for client in clients]
    num_tokens = 40 * num_streams
    # Enough new tokens that the memory per token is most of the growth.
    await asyncio.to_thread(wait_until, lambda: _num_tokens(clients) > sum(lengths) + num_tokens, "more tokens")
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    new_tokens = _num_tokens(clients) - sum(lengths)
    # Memory per token: its id in the request and its text in the client, but no event or output.
    assert grown < 1_000_000 + 500 * new_tokens, (grown, new_tokens)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for i, client in enumerate(clients):
        assert client.text == expected(i, len(client.text)) and not client.done


async def turns_of_many(stop_early: bool) -> tuple[list[int], list[int]]:
    """Return the event loop iterations in which each of 1,000 streams of one request begins and ends."""
    turn = 0
    begun: list[int] = []
    ended: list[int] = []
    all_have_begun = asyncio.Event()

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def stream() -> AsyncGenerator[RequestOutput, None]:
        begun.append(turn)
        if len(begun) == 1_000:
            all_have_begun.set()
        try:
            if stop_early:
                await asyncio.Event().wait()
            yield RequestOutput("", finish_reason="stop")
        finally:
            ended.append(turn)

    async def read() -> None:
        async with aclosing(_merge([stream() for _ in range(1_000)])) as batches:
            outputs = [output async for batch in batches for output in batch]
            assert sorted(index for index, _ in outputs) == list(range(1_000))

    counting, reading = asyncio.create_task(count()), asyncio.create_task(read())
    await all_have_begun.wait()
    if stop_early:
        reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    counting.cancel()
    return begun, ended


@pytest.mark.parametrize("stop_early", [False, True])
def test_streams_of_one_request_start_and_end_in_several_loop_iterations(stop_early: bool) -> None:
    begun, ended = asyncio.run(turns_of_many(stop_early))
    assert len(begun) == len(ended) == 1_000
    assert max(Counter(begun).values()) <= 256
    assert not stop_early or max(Counter(ended).values()) <= 256


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["alone", ["one", "two", "three"]])
def test_disconnect_aborts_at_once(prompt: str | list[str], stream: bool) -> None:
    """The abort works even before the first token: the engine is stopped in its first step."""
    with serve() as served:
        served.runner.running.clear()
        num_prompts = len(prompt) if isinstance(prompt, list) else 1
        body = {"prompt": prompt, "stream": stream, "max_tokens": 400}

        async def ask_and_leave() -> None:
            async with httpx.AsyncClient(base_url=served.url) as client:
                task = asyncio.create_task(client.post("/v1/completions", json=body))
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
