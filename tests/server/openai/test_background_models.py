"""Responses in the background on a server with several models, which are loaded and unloaded meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import openai
import pytest

from metal_engine.server.openai.response_state import ResponseState
from tests.server.test_errors import check_error
from tests.support.background import finished, wait_for_status, wait_until_freed
from tests.support.several_models import MEMORY_FOR_TWO, FakeModel, SeveralFakes, serve_models


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
