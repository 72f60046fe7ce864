"""Clients that leave, and a server that stops. In `hostile`, clients leave at any time."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from tests.support.serving import MODEL, serve, wait_until


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
