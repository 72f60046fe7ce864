"""Responses in the background on a server that is full or shuts down, and their metrics."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
import pytest

from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.background import HTTP, LONG, SLOW, finished, wait_for_status
from tests.support.calling import CONFIG
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until


def counts(served: Served) -> dict[str, int]:
    """Return the metrics of responses that are not 0."""
    text = HTTP.get(f"{served.url}/metrics").text
    sample = r'metal_engine:((?:background|stored)_responses\w*)\{model_name="[^"]+"(?:,status="(\w+)")?\} (\d+)'
    found = re.findall(sample, text)
    return {" ".join(filter(None, (name, status))): int(value) for name, status, value in found if int(value)}


def test_metrics() -> None:
    args = ServerArgs(shutdown_timeout=1, max_stored_responses=3)
    with serve(config=CONFIG, step_time=SLOW, args=args) as served:
        client = served.client()
        assert not counts(served)
        served.runner.running.clear()
        begun = [client.responses.create(**LONG).id for _ in range(2)]
        assert counts(served) == {"background_responses queued": 2}
        served.runner.running.set()
        for one in begun:
            wait_for_status(client, one, "in_progress")
        assert counts(served) == {"background_responses in_progress": 2}
        client.responses.cancel(begun[0])
        client.responses.delete(begun[1])
        assert counts(served) == {"background_responses_ended_total cancelled": 2}
        assert served.post("/v1/responses", {**LONG, "temperature": -1}).status_code == 400
        for _ in range(3):
            finished(client, client.responses.create(**{**LONG, "max_output_tokens": 1}).id)
        assert counts(served) == {
            "background_responses_ended_total cancelled": 2,
            "background_responses_ended_total incomplete": 3,
            "stored_responses_dropped_total": 1,
        }


def test_limits() -> None:
    args = ServerArgs(shutdown_timeout=1, max_stored_responses=2)
    with serve(config=CONFIG, step_time=SLOW, args=args) as served:
        client = served.client()
        kept = [client.responses.create(**LONG).id for _ in range(2)]
        check_error(served.post("/v1/responses", LONG), 503, None, "overloaded")
        plain = client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(plain.id)
        client.responses.cancel(kept[0])
        new = client.responses.create(**LONG).id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept[0])
        client.responses.delete(kept[1])
        client.responses.delete(new)
        served.wait_until_idle()
    with serve(args=ServerArgs(max_stored_responses=0)) as served:
        check_error(served.post("/v1/responses", {"input": "hi", "background": True}), 400, "background")


def test_events_count_against_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response whose events fill the store drops its oldest events, and goes on."""
    monkeypatch.setattr("metal_engine.server.app.ResponseStore", lambda number: ResponseStore(number, 20_000))
    with serve(config=CONFIG, step_time=0.002) as served:
        client = served.client()
        plain = client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
        stream = client.responses.create(**{**LONG, "max_output_tokens": 1000}, stream=True)
        response_id = next(stream).response.id  # type: ignore[union-attr]
        stream.close()
        response = finished(client, response_id)
        assert response.usage.output_tokens == 1000
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(plain.id)
        error = check_error(HTTP.get(f"{served.url}/v1/responses/{response_id}?stream=true"), 400, "starting_after")
        after = int(error["message"].split("before ")[1].split()[0])
        text = HTTP.get(f"{served.url}/v1/responses/{response_id}?stream=true&starting_after={after - 1}").text
        assert "event: response.incomplete" in text
        served.wait_until_idle()


def test_a_full_queue_rejects_it() -> None:
    args = ServerArgs(shutdown_timeout=1, max_num_queued_reqs=1)
    with serve(config=CONFIG, args=args) as served:
        served.runner.running.clear()
        client = served.client()
        ids = [client.responses.create(**{**LONG, "max_output_tokens": 5}).id]
        while (answer := served.post("/v1/responses", LONG)).status_code == 200:
            ids.append(answer.json()["id"])
        check_error(answer, 503, None, "overloaded")
        for one in ids:
            assert client.responses.cancel(one).status == "cancelled"
        served.runner.running.set()
        served.wait_until_idle()


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_shutdown_cancels_what_no_client_reads(method: str) -> None:
    with serve(config=CONFIG, step_time=SLOW) as served:
        client = served.client()
        unread = client.responses.create(**LONG)
        stream = client.responses.create(**{**LONG, "max_output_tokens": 100}, stream=True)
        begun: Any = next(stream)
        if method == "GET":
            created, stream = stream, client.responses.retrieve(begun.response.id, stream=True)
            next(stream)
            created.close()
            wait_until(lambda: served.server._lifecycle.num_active <= 1, "the disconnect")
        served.runner.running.clear()  # the server ends when the stream ends
        served.server._shutdown_timeout = DEADLINE
        stopping = asyncio.run_coroutine_threadsafe(served.server.stop(), served.loop)
        wait_for_status(client, unread.id, "cancelled")
        check_error(served.post("/v1/responses", LONG), 503, None, "shutting_down")
        served.runner.running.set()
        *_, last = stream
        assert (last.type, last.response.id) == ("response.incomplete", begun.response.id)
        stopping.result(DEADLINE)


def test_shutdown_cuts_streams_that_take_too_long() -> None:
    with serve(config=CONFIG, step_time=SLOW) as served:
        client = served.client()
        stream = client.responses.create(**LONG, stream=True)
        begun: Any = next(stream)
        read_again = client.responses.retrieve(begun.response.id, stream=True)
        next(read_again)
        served.server._shutdown_timeout = 0.1
        asyncio.run_coroutine_threadsafe(served.server.stop(), served.loop)
        for one in (stream, read_again):
            *_, last = one
            assert last.type == "response.failed"
            assert last.response.status in ("failed", "cancelled")
