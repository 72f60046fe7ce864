"""/v1/responses in the background: states, streams that go on, cancelling and deleting."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import openai
import pytest

from metal_engine.server.openai.response_state import ResponseState
from tests.server.test_errors import check_error
from tests.support.background import HTTP, LONG, SLOW, finished, wait_for_status, wait_until_freed
from tests.support.calling import CONFIG, FLAT_TOOLS, RECORD
from tests.support.serving import MODEL, Served, serve, wait_until


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    with serve(config=CONFIG, step_time=SLOW) as served:
        yield served


def test_a_background_response_completes_like_a_plain_response(calling: Served) -> None:
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


def test_a_background_response_is_queued_then_runs_until_cancelled(slow: Served) -> None:
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


def test_cancelling_a_finished_response_leaves_the_response_unchanged(served: Served) -> None:
    client = served.client()
    begun = client.responses.create(model=MODEL, input="hi", background=True, max_output_tokens=2)
    response = finished(client, begun.id)
    assert client.responses.cancel(begun.id) == response and response.status == "incomplete"
    plain = client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    error = check_error(HTTP.post(f"{served.url}/v1/responses/{plain.id}/cancel"), 400, "response_id")
    assert "created with background" in error["message"]


def test_an_unfinished_response_cannot_be_continued(slow: Served) -> None:
    client = slow.client()
    begun = client.responses.create(**LONG)
    body = {"model": MODEL, "input": "x", "previous_response_id": begun.id}
    check_error(slow.post("/v1/responses", body), 400, "previous_response_id")
    client.responses.delete(begun.id)


UNKNOWN = [
    *(("GET", f"resp-0{more}") for more in ("", "?stream=true", "/input_items")),
    *(("POST", "resp-0/cancel"), ("DELETE", "resp-0")),
]


def test_deleting_a_running_background_response_aborts_generation(slow: Served) -> None:
    """Its id is as unknown as any other afterwards."""
    client = slow.client()
    begun = client.responses.create(**LONG)
    wait_for_status(client, begun.id, "in_progress")
    assert HTTP.delete(f"{slow.url}/v1/responses/{begun.id}").json()["deleted"] is True
    assert slow.engine.num_open_requests == 0
    for method, path in UNKNOWN:
        path = path.replace("resp-0", begun.id)
        check_error(HTTP.request(method, f"{slow.url}/v1/responses/{path}"), 404, None, "response_not_found")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), [
    ({"input": "a" * 5000}, "input"),
    ({"input": "a", "max_output_tokens": 10_000}, "max_output_tokens"),
    ({"input": "a", "temperature": -1}, "temperature"),
    ({"input": "a", "store": False}, "background"),
    ({"input": "a", "model": "other"}, "model"),
])  # fmt: skip
def test_bad_requests_are_not_stored(slow: Served, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = slow.post("/v1/responses", {"model": MODEL, "background": True, "stream": stream, **body})
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(("query", "param"), [
    ("starting_after=1", "starting_after"),
    ("stream=true&starting_after=-1", "starting_after"),
    ("stream=true&starting_after=a", "starting_after"),
    ("stream=maybe", "stream"),
    ("stream=true", "stream"),
])  # fmt: skip
def test_bad_queries(served: Served, query: str, param: str) -> None:
    client = served.client()
    ids = [
        client.responses.create(model=MODEL, input="hi", max_output_tokens=1).id,
        client.responses.create(model=MODEL, input="hi", max_output_tokens=1, background=True).id,
    ]
    for one in ids:
        check_error(HTTP.get(f"{served.url}/v1/responses/{one}?{query}"), 400, param)


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
    assert client.responses.retrieve(first.response.id) == events[-1].response
    for after in range(-1, len(events), 9):
        more = {} if after < 0 else {"starting_after": after}
        assert list(client.responses.retrieve(first.response.id, stream=True, **more)) == events[after + 1 :]
    assert not list(client.responses.retrieve(first.response.id, stream=True, starting_after=10**30))


def test_a_background_stream_resumes_after_a_client_disconnect(slow: Served) -> None:
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
