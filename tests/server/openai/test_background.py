"""/v1/responses in the background: states, streams that go on, cancelling, deleting, limits and shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import httpx
import openai
import pytest

from metal_engine.server.errors import APIError
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.event_log import EventLog
from metal_engine.server.openai.response_state import ResponseState
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.settings.args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.serving import DEADLINE, MODEL, Served, serve, wait_until
from tests.support.several import MEMORY_FOR_TWO, FakeModel, SeveralFakes, serve_models
from tests.support.splitting import answer_format
from tests.support.tool_formats import RECORDED, TOOLS
from tools.fixtures.fake_engine import TOOL_TEMPLATE, fake_config, script, tiny_tokenizer

CONFIG = fake_config(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=2048)
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
RECORD = RECORDED[0]
ANSWER = f"<think>\nhm\n</think>\n\n{RECORD.text}"
# Steps of a model that writes more tokens than a test waits for.
SLOW = 0.005
LONG: dict[str, Any] = {"model": MODEL, "input": "hi", "background": True, "max_output_tokens": 3000}
HTTP = httpx.Client(timeout=DEADLINE)


@pytest.fixture(scope="module")
def _slow() -> Iterator[Served]:
    with serve(config=CONFIG, step_time=SLOW) as served:
        yield served


@pytest.fixture
def slow(_slow: Served) -> Iterator[Served]:
    yield _slow
    _slow.wait_until_idle()


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)
    with serve(script(ANSWER), config=CONFIG, tokenizer=tokenizer, answer_format=answer_format("json_tools")) as served:
        yield served


def finished(client: openai.OpenAI, response_id: str) -> Any:
    """Wait for the end of a response, and return it."""
    deadline = time.monotonic() + DEADLINE
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return response


def wait_for_status(client: openai.OpenAI, response_id: str, status: str) -> None:
    wait_until(lambda: client.responses.retrieve(response_id).status == status, status)


def test_its_states(calling: Served) -> None:
    client = calling.client()
    begun = client.responses.create(model=MODEL, input="hi", tools=FLAT_TOOLS, background=True)
    assert begun.background and begun.status in ("queued", "in_progress", "completed")
    response = finished(client, begun.id)
    plain = client.responses.create(model=MODEL, input="hi", tools=FLAT_TOOLS)
    assert not plain.background
    assert (response.status, response.id, response.created_at) == ("completed", begun.id, begun.created_at)
    assert response.output_text == plain.output_text == RECORD.content
    assert [item.type for item in response.output] == [item.type for item in plain.output]
    assert plain.usage is not None and response.usage.output_tokens == plain.usage.output_tokens
    cut = client.responses.create(model=MODEL, input="hi", background=True, max_output_tokens=3)
    assert finished(client, cut.id).status == "incomplete"
    assert finished(client, cut.id).incomplete_details.reason == "max_output_tokens"
    calling.wait_until_idle()


def test_it_is_queued_then_in_progress(slow: Served) -> None:
    client = slow.client()
    slow.runner.running.clear()
    begun = client.responses.create(**LONG)
    assert begun.status == client.responses.retrieve(begun.id).status == "queued" and begun.output == []
    slow.runner.running.set()
    wait_for_status(client, begun.id, "in_progress")
    wait_until(lambda: bool(client.responses.retrieve(begun.id).output_text), "text")
    partial = client.responses.retrieve(begun.id)
    assert partial.usage is None and partial.output[0].status == "in_progress"  # type: ignore[union-attr]
    cancelled = client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.id, cancelled.error) == ("cancelled", begun.id, None)
    assert cancelled.output_text.startswith(partial.output_text)
    assert cancelled.output[0].status == "incomplete"  # type: ignore[union-attr]
    wait_until(lambda: slow.engine.num_open_requests == 0, "the engine")
    assert client.responses.retrieve(begun.id) == cancelled == client.responses.cancel(begun.id)
    with pytest.raises(openai.BadRequestError, match="is cancelled, so it cannot be continued"):
        client.responses.create(model=MODEL, input="x", previous_response_id=begun.id)


def test_cancelling_what_has_finished(served: Served) -> None:
    client = served.client()
    begun = client.responses.create(model=MODEL, input="hi", background=True, max_output_tokens=2)
    response = finished(client, begun.id)
    assert client.responses.cancel(begun.id) == response and response.status == "incomplete"
    plain = client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    error = check_error(HTTP.post(f"{served.url}/v1/responses/{plain.id}/cancel"), 400, "response_id")
    assert "created with background" in error["message"]


def test_a_conversation_in_the_background(served: Served) -> None:
    client = served.client()
    first = finished(client, client.responses.create(model=MODEL, input="a", background=True, max_output_tokens=5).id)
    more: dict[str, Any] = {"input": "b", "previous_response_id": first.id, "max_output_tokens": 5}
    second = finished(client, client.responses.create(model=MODEL, background=True, **more).id)
    plain = client.responses.create(model=MODEL, **more)
    assert plain.usage is not None and second.usage.input_tokens == plain.usage.input_tokens
    assert second.output_text == plain.output_text and second.previous_response_id == first.id
    served.wait_until_idle()


def test_an_unfinished_response_cannot_be_continued(slow: Served) -> None:
    client = slow.client()
    begun = client.responses.create(**LONG)
    body = {"model": MODEL, "input": "x", "previous_response_id": begun.id}
    check_error(slow.post("/v1/responses", body), 400, "previous_response_id")
    client.responses.delete(begun.id)


UNKNOWN = [
    ("GET", "resp-0"),
    ("GET", "resp-0?stream=true"),
    ("GET", "resp-0/input_items"),
    ("POST", "resp-0/cancel"),
    ("DELETE", "resp-0"),
]


@pytest.mark.parametrize(("method", "path"), UNKNOWN)
def test_unknown_ids(served: Served, method: str, path: str) -> None:
    response = HTTP.request(method, f"{served.url}/v1/responses/{path}")
    check_error(response, 404, None, "response_not_found")


def test_deleting_while_it_runs(slow: Served) -> None:
    client = slow.client()
    begun = client.responses.create(**LONG)
    wait_for_status(client, begun.id, "in_progress")
    assert HTTP.delete(f"{slow.url}/v1/responses/{begun.id}").json()["deleted"] is True
    assert slow.engine.num_open_requests == 0
    for method, path in UNKNOWN:
        path = path.replace("resp-0", begun.id)
        check_error(HTTP.request(method, f"{slow.url}/v1/responses/{path}"), 404, None, "response_not_found")


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"input": "a" * 5000}, "input"),
    ({"input": "a", "max_output_tokens": 10_000}, "max_output_tokens"),
    ({"input": "a", "temperature": -1}, "temperature"),
    ({"input": "a", "store": False}, "background"),
    ({"input": "a", "model": "other"}, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
def test_bad_requests_are_not_stored(slow: Served, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = slow.post("/v1/responses", {"model": MODEL, "background": True, "stream": stream, **body})
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


BAD_QUERIES = [
    ("starting_after=1", "starting_after"),
    ("stream=true&starting_after=-1", "starting_after"),
    ("stream=true&starting_after=a", "starting_after"),
    ("stream=maybe", "stream"),
    ("stream=true", "stream"),
]


@pytest.mark.parametrize(("query", "param"), BAD_QUERIES)
def test_bad_queries(served: Served, query: str, param: str) -> None:
    client = served.client()
    ids = [
        client.responses.create(model=MODEL, input="hi", max_output_tokens=1).id,
        client.responses.create(model=MODEL, input="hi", max_output_tokens=1, background=True).id,
    ]
    for one in ids:
        check_error(HTTP.get(f"{served.url}/v1/responses/{one}?{query}"), 400, param)
    served.wait_until_idle()


def test_a_stream_that_is_resumed_everywhere(calling: Served) -> None:
    client = calling.client()
    create: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": FLAT_TOOLS}
    events = list(client.responses.create(**create, background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    plain = [event.type for event in client.responses.create(**create, stream=True)]
    assert set(plain) == set(kinds) - {"response.queued"}
    first: Any = events[0]
    last: Any = events[-1]
    assert client.responses.retrieve(first.response.id) == last.response
    for after in range(-1, len(events), 9):
        more = {} if after < 0 else {"starting_after": after}
        resumed = list(client.responses.retrieve(first.response.id, stream=True, **more))  # type: ignore[call-overload]
        assert resumed == events[after + 1 :]
    assert not list(client.responses.retrieve(first.response.id, stream=True, starting_after=10**30))
    calling.wait_until_idle()


def test_a_client_that_disconnects_and_comes_back(slow: Served) -> None:
    client = slow.client()
    with client.responses.create(**{**LONG, "max_output_tokens": 100}, stream=True) as stream:
        events = [next(stream) for _ in range(10)]
    response_id = events[0].response.id
    with client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number) as stream:
        events += [next(stream) for _ in range(5)]
    with ThreadPoolExecutor() as pool:
        more = [pool.submit(lambda: list(client.responses.retrieve(response_id, stream=True))) for _ in range(3)]
    events += list(client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert all([event.sequence_number for event in one.result()] == list(range(len(events))) for one in more)
    final = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (final.status, final.output_text, final.usage.output_tokens) == ("incomplete", text, 100)


def test_cancelling_a_stream(slow: Served) -> None:
    client = slow.client()
    stream = client.responses.create(**LONG, stream=True)
    begun: Any = next(stream)
    wait_for_status(client, begun.response.id, "in_progress")
    client.responses.cancel(begun.response.id)
    *_, last = stream
    assert last.type == "response.failed" and last.response.status == "cancelled"
    assert last.response == client.responses.retrieve(begun.response.id)


def test_a_failure(slow: Served) -> None:
    client = slow.client()
    stream = client.responses.create(**LONG, stream=True)
    response_id = next(stream).response.id  # type: ignore[union-attr]
    other = client.responses.create(**LONG)
    wait_for_status(client, other.id, "in_progress")
    slow.runner.error_for = lambda tokens: RuntimeError("no more")
    for one in (response_id, other.id):
        response = finished(client, one)
        assert response.status == "failed" and "no more" in response.error.message
    slow.runner.error_for = None
    kinds = [event.type for event in client.responses.retrieve(response_id, stream=True)]
    assert kinds[-2:] == ["error", "response.failed"]


def test_many_at_once(slow: Served) -> None:
    client = slow.client()

    def one(i: int) -> None:
        body: dict[str, Any] = {"model": MODEL, "input": f"{i}", "background": True, "max_output_tokens": 20}
        begun = client.responses.create(**body)
        match i % 3:
            case 0:
                assert len(finished(client, begun.id).output_text) > 0
            case 1:
                client.responses.cancel(begun.id)
                assert client.responses.retrieve(begun.id).status in ("cancelled", "incomplete")
            case 2:
                client.responses.delete(begun.id)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(one, i) for i in range(18)]:
            done.result()


def test_two_cancel_at_once(slow: Served) -> None:
    client = slow.client()
    begun = client.responses.create(**LONG)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(client.responses.cancel, begun.id) for _ in range(8)]:
            assert done.result().status == "cancelled"


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


def test_shutdown_cancels_what_no_client_reads() -> None:
    with serve(config=CONFIG, step_time=SLOW) as served:
        client = served.client()
        unread = client.responses.create(**LONG)
        stream = client.responses.create(**{**LONG, "max_output_tokens": 100}, stream=True)
        begun: Any = next(stream)
        served.server._shutdown_timeout = DEADLINE
        stopping = asyncio.run_coroutine_threadsafe(served.server.stop(), served.loop)
        wait_for_status(client, unread.id, "cancelled")
        check_error(served.post("/v1/responses", LONG), 503, None, "shutting_down")
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


def test_a_page_of_another_origin_cannot_cancel(slow: Served) -> None:
    client = slow.client()
    begun = client.responses.create(**LONG)
    url = f"{slow.url}/v1/responses/{begun.id}"
    for method, path in (("POST", "/cancel"), ("DELETE", "")):
        answer = HTTP.request(method, url + path, headers={"sec-fetch-site": "cross-site"})
        check_error(answer, 403, None, "origin_not_allowed")
    for path in ("", "/input_items", "/cancel"):
        HTTP.get(url + path)
    assert client.responses.retrieve(begun.id).status in ("queued", "in_progress")
    assert HTTP.get(url + "/cancel").status_code == 405
    client.responses.delete(begun.id)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeakSet[ResponseState]]:
    """Yield the responses that were created since, and are still in memory."""
    alive: WeakSet[ResponseState] = WeakSet()
    create = ResponseState.__init__

    def recorded(state: ResponseState, *args: Any) -> None:
        create(state, *args)
        alive.add(state)

    monkeypatch.setattr(ResponseState, "__init__", recorded)
    yield alive


def wait_until_freed(states: WeakSet[ResponseState]) -> None:
    def are_freed() -> bool:
        gc.collect()
        return not states

    wait_until(are_freed, "the responses to be freed")


def test_deleted_and_rejected_responses_are_freed(slow: Served, states: WeakSet[ResponseState]) -> None:
    client = slow.client()
    for stream in (False, True):
        assert slow.post("/v1/responses", {**LONG, "input": "a" * 5000, "stream": stream}).status_code == 400
    begun = client.responses.create(**LONG)
    client.responses.create(**LONG, stream=True).close()
    for state in list(states):
        with suppress(openai.NotFoundError):  # a rejected one
            client.responses.delete(state.id)
    del state
    wait_until_freed(states)
    assert client.responses.create(model=MODEL, input="a", max_output_tokens=1).id != begun.id


# --- several models -----------------------------------------------------------------------------------------


@pytest.fixture
def several() -> Iterator[SeveralFakes]:
    models = {name: FakeModel(salt, step_time=0.002) for salt, name in enumerate(["a", "b", "c"])}
    with serve_models({name: one.source for name, one in models.items()}, MEMORY_FOR_TWO) as served:
        made = SeveralFakes(served, models)
        yield made
        for one in models.values():
            one.gate.set()
        made.wait_until_idle()


def several_client(several: SeveralFakes) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{several.served.url}/v1", api_key="none", max_retries=0)


def test_it_keeps_its_model_loaded(several: SeveralFakes) -> None:
    client = several_client(several)
    begun = client.responses.create(model="b", input="hello", background=True, max_output_tokens=200)
    wait_for_status(client, begun.id, "in_progress")
    for name in ("a", "c", "a", "c"):  # memory for one beside it
        several.check(name, "once upon")
        assert several.served.states()["b"] == "loaded"
    other = client.responses.create(model="a", input="x", previous_response_id=finished(client, begun.id).id)
    assert other.model == "a"
    response = client.responses.retrieve(begun.id)
    assert (response.model, response.output_text) == ("b", several.chat_text("b", "hello", 200))
    several.wait_until_idle()
    several.check("a", "x")
    several.check("c", "x")
    assert several.served.states()["b"] != "loaded"
    assert client.responses.retrieve(begun.id) == response  # needs no model


def test_a_response_waits_for_its_model(several: SeveralFakes) -> None:
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
    expected = several.chat_text("b", "hello")
    assert last.response.output_text == finished(client, plain.id).output_text == expected
    assert client.responses.retrieve(cancelled.id).status == "cancelled"
    error = several.served.post("/v1/responses", {**body, "model": "nobody"})
    check_error(error, 404, "model", "model_not_found")


def test_a_late_error_ends_it(several: SeveralFakes, states: WeakSet[ResponseState]) -> None:
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


# --- the log of events --------------------------------------------------------------------------------------


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
