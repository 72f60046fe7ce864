"""Responses in the background: a full server, shutdown, several models, metrics, and the log of events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import openai
import pytest

from metal_engine.server.errors import APIError
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.event_log import EventLog
from metal_engine.server.openai.response_state import ResponseState
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.background import HTTP, LONG, SLOW, finished, wait_for_status, wait_until_freed
from tests.support.calling import CONFIG
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tests.support.several_models import SeveralFakes, serve_fakes


def counts(served: Served) -> dict[str, int]:
    """Return the metrics of responses that are not 0."""
    text = HTTP.get(f"{served.url}/metrics").text
    sample = r'metal_engine:((?:background|stored)_responses\w*)\{model_name="[^"]+"(?:,status="(\w+)")?\} (\d+)'
    found = re.findall(sample, text)
    return {" ".join(filter(None, (name, status))): int(value) for name, status, value in found if int(value)}


def test_metrics() -> None:
    with serve(config=CONFIG, step_time=SLOW, args=ServerArgs(shutdown_timeout=1, max_stored_responses=3)) as served:
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
    with serve(config=CONFIG, step_time=SLOW, args=ServerArgs(shutdown_timeout=1, max_stored_responses=2)) as served:
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
        assert finished(client, response_id).usage.output_tokens == 1000
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(plain.id)
        error = check_error(HTTP.get(f"{served.url}/v1/responses/{response_id}?stream=true"), 400, "starting_after")
        after = int(error["message"].split("before ")[1].split()[0])
        text = HTTP.get(f"{served.url}/v1/responses/{response_id}?stream=true&starting_after={after - 1}").text
        assert "event: response.incomplete" in text


def test_a_full_queue_rejects_background_responses_with_503() -> None:
    with serve(config=CONFIG, args=ServerArgs(shutdown_timeout=1, max_num_queued_reqs=1)) as served:
        served.runner.running.clear()
        client = served.client()
        ids = [client.responses.create(**{**LONG, "max_output_tokens": 5}).id]
        while (answer := served.post("/v1/responses", LONG)).status_code == 200:
            ids.append(answer.json()["id"])
        check_error(answer, 503, None, "overloaded")
        for one in ids:
            assert client.responses.cancel(one).status == "cancelled"
        served.runner.running.set()


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_shutdown_cancels_background_responses_without_a_reader(method: str) -> None:
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
        read_again = client.responses.retrieve(next(stream).response.id, stream=True)
        next(read_again)
        served.server._shutdown_timeout = 0.1
        asyncio.run_coroutine_threadsafe(served.server.stop(), served.loop)
        for one in (stream, read_again):
            *_, last = one
            assert last.type == "response.failed"
            assert last.response.status in ("failed", "cancelled")


def event(number: int, text: str = "") -> bytes:
    return named_sse({"type": "t", "text": text, "sequence_number": number})


def numbers(data: bytes) -> list[int]:
    return [json.loads(one.split(b"data: ")[1])["sequence_number"] for one in data.split(b"\n\n") if one]


def test_a_log_is_bounded() -> None:
    async def read(log: EventLog, after: int) -> list[int]:
        return numbers(b"".join([data async for data in log.read(after)]))

    async def check() -> None:
        log = EventLog(max_characters=20_000)
        slow_reader = log.read()
        for i in range(0, 200, 2):
            log.append(event(i, "x" * 50) + event(i + 1))
            if not i:
                assert numbers(await anext(slow_reader)) == [0, 1]
        log.append(b"")
        log.close()
        assert log.num_characters <= 20_000 and log.num_readers == 1
        assert b"events_dropped" in await anext(slow_reader)
        assert [data async for data in slow_reader] == [] and log.num_readers == 0
        with pytest.raises(APIError) as info:
            log.check(5)
        assert (info.value.status_code, info.value.param) == (400, "starting_after")
        log.check(150)
        assert await read(log, 150) == list(range(151, 200))
        assert await read(log, 151) == list(range(152, 200))
        assert await read(log, 199) == await read(log, 10**20) == []

    asyncio.run(check())


def test_a_long_log_is_read_in_pieces() -> None:
    async def check() -> None:
        log = EventLog()
        for i in range(3000):
            log.append(event(i, "x" * 100))
        log.close()
        pieces = [data async for data in log.read()]
        assert numbers(b"".join(pieces)) == list(range(3000))
        assert len(pieces) > 3 and max(map(len, pieces)) < 100_000

    asyncio.run(check())


@pytest.fixture
def several() -> Iterator[SeveralFakes]:
    with serve_fakes("abc", step_time=0.002) as made:
        yield made


def several_client(several: SeveralFakes) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{several.served.url}/v1", api_key="none", max_retries=0)


def test_a_running_background_response_keeps_the_model_loaded(several: SeveralFakes) -> None:
    client = several_client(several)
    begun = client.responses.create(model="b", input="hello", background=True, max_output_tokens=200)
    wait_for_status(client, begun.id, "in_progress")
    (runner,) = several.models["b"].runners
    runner.running.clear()  # otherwise, it could finish before the last load
    for name in ("a", "c", "a", "c"):  # memory for one beside it
        several.check(name, "once upon")
        assert several.served.states()["b"] == "loaded"
    runner.running.set()
    other = client.responses.create(model="a", input="x", previous_response_id=finished(client, begun.id).id)
    assert other.model == "a"
    response = client.responses.retrieve(begun.id)
    assert (response.model, response.output_text) == ("b", several.chat_text("b", "hello", 200))
    several.wait_until_idle()
    several.check("a", "x")
    several.check("c", "x")
    assert several.served.states()["b"] != "loaded"
    assert client.responses.retrieve(begun.id) == response  # needs no model


def test_a_background_response_stays_queued_while_the_model_loads(several: SeveralFakes) -> None:
    client = several_client(several)
    model = several.models["b"]
    model.gate.clear()
    body: dict[str, Any] = {"model": "b", "input": "hello", "background": True, "max_output_tokens": 8}
    plain = client.responses.create(**body)
    stream = client.responses.create(**body, stream=True)
    assert [next(stream).type, next(stream).type] == ["response.created", "response.queued"]
    assert (plain.status, plain.model) == ("queued", "b")
    cancelled = client.responses.create(**body)
    assert client.responses.cancel(cancelled.id).status == "cancelled"
    assert client.responses.retrieve(plain.id).status == "queued"
    model.gate.set()
    *_, last = stream
    assert last.response.output_text == finished(client, plain.id).output_text == several.chat_text("b", "hello")
    assert client.responses.retrieve(cancelled.id).status == "cancelled"
    check_error(several.served.post("/v1/responses", {**body, "model": "nobody"}), 404, "model", "model_not_found")


def test_a_late_error_fails_a_background_response(several: SeveralFakes, states: WeakSet[ResponseState]) -> None:
    client = several_client(several)
    begun = client.responses.create(model="c", input="a" * 5000, background=True)
    response = finished(client, begun.id)
    assert response.status == "failed" and response.error.code == "invalid_prompt"
    several.wait_until_idle()
    several.models["b"].problem = "it is broken"
    begun = client.responses.create(model="b", input="a", background=True)
    response = finished(client, begun.id)
    assert response.status == "failed" and "it is broken" in response.error.message
    for state in list(states):
        client.responses.delete(state.id)
    del state
    wait_until_freed(states)
