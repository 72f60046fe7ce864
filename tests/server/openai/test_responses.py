"""/v1/responses, driven by the official client, and the input items of stored responses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from metal_engine.json_values import num_characters
from metal_engine.server.errors import APIError
from metal_engine.server.openai.response_state import AskedResponse, ResponseState
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.server.openai.responses_protocol import input_messages
from tests.server.test_errors import check_error
from tests.support.calling import FLAT_TOOLS, RECORD
from tests.support.serving import DEADLINE, MODEL, Served, serve
from tests.support.tool_formats import TOOLS


def prompt_tokens(served: Served, messages: list[dict[str, Any]], **more: Any) -> int:
    return len(served.tokenizer.apply_chat_template(messages, **more))


def test_text(served: Served) -> None:
    response = served.client().responses.create(
        model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=20, metadata={"a": "b"}
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    chat = served.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=20)  # type: ignore[arg-type]
    assert response.output_text == chat.choices[0].message.content
    assert response.id.startswith("resp") and response.object == "response"
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.input_tokens == prompt_tokens(served, messages)
    assert response.usage.input_tokens_details.cache_write_tokens == 0
    assert (response.usage.output_tokens, response.metadata) == (20, {"a": "b"})
    assert response.instructions == "Be brief." and response.tools == []


def test_items(calling: Served) -> None:
    response = calling.client().responses.create(model=MODEL, input="hi", tools=FLAT_TOOLS)
    assert response.status == "completed"
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and reasoning.content[0].text == "hm"
    assert message.type == "message" and response.output_text == RECORD.content
    assert [(c.name, json.loads(c.arguments)) for c in calls if c.type == "function_call"] == RECORD.calls
    assert len({item.id for item in response.output}) == 4


def test_stream(calling: Served) -> None:
    """The events add up to the final response, and the client's own accumulator agrees."""
    client = calling.client()
    events = list(client.responses.create(model=MODEL, input="hi", tools=FLAT_TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    final = events[-1].response  # type: ignore[union-attr]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text == RECORD.content
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm"
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
    arguments = ["", "", "", ""]
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] += event.delta
    calls = [item for item in final.output if item.type == "function_call"]
    assert arguments[2:] == [call.arguments for call in calls]
    with client.responses.stream(model=MODEL, input="hi", tools=FLAT_TOOLS) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == RECORD.content


def test_previous_response_id_continues_the_conversation(served: Served) -> None:
    client = served.client()
    first = client.responses.create(model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=5)
    second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id, max_output_tokens=5)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    assert second.usage is not None and second.usage.input_tokens == prompt_tokens(served, messages)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.create(model=MODEL, input="x", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError) as info:
            call()
        assert info.value.code == "response_not_found"
    third = client.responses.create(
        model=MODEL, input="x", previous_response_id=second.id, max_output_tokens=1, store=False
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


def test_output_items_sent_back_as_input_form_the_conversation(calling: Served) -> None:
    """The output items of a response, sent back as input with the results of the calls, form the conversation."""
    client = calling.client()
    response = client.responses.create(model=MODEL, input="hi", tools=FLAT_TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in response.output
        if item.type == "function_call"
    ]
    items: list[Any] = [{"role": "user", "content": "hi"}, *[i.model_dump() for i in response.output], *results]
    by_items = client.responses.create(model=MODEL, input=items, tools=FLAT_TOOLS)
    by_id: Any = client.responses.create(model=MODEL, input=results, previous_response_id=response.id, tools=FLAT_TOOLS)
    assert by_items.usage is not None and by_items.usage.input_tokens == by_id.usage.input_tokens
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": RECORD.content},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "sunny"},
    ]
    assert by_id.usage.input_tokens == prompt_tokens(calling, messages, tools=TOOLS)


def test_text_after_a_call_stays_before_the_result() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = [{"role": "assistant", "content": text} for text in ("a", "b", "c")]
    result = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    messages = input_messages([said[0], call, said[1], result, said[2]])
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert [part["text"] for part in messages[0]["content"]] == ["a", "b"]


BAD_FIELDS: dict[str, list[Any]] = {
    "n": [3], "allowed_token_ids": [[5, 2**63]], "metadata": [{"a": 5}], "max_output_tokens": [0],
    "background": ["yes"], "truncation": ["auto"], "temperature": [-1],
    "input": [5, [], [5], [{}], [{"role": "user", "content": 5}], [{"role": "wizard", "content": "a"}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"type": "item_reference", "id": "x"}], [{"type": "function_call", "name": "f", "arguments": "{}"}]],
    "tools": [[{"type": "web_search"}], [{"type": "function"}]], "tool_choice": [{"type": "file_search"}],
}  # fmt: skip


@pytest.mark.parametrize(("body", "param"), [
    ({}, "input"),
    ({"input": "hi", "n": 3, "stream": True}, "n"),
    ({"input": "a" * 600}, "input"),
    ({"input": "a", "max_output_tokens": 10_000}, "max_output_tokens"),
    ({"input": "a", "background": True, "store": False}, "background"),
    *(({"input": "a", field: value}, field) for field, values in BAD_FIELDS.items() for value in values),
])  # fmt: skip
def test_bad_requests(served: Served, body: dict[str, Any], param: str) -> None:
    code = "context_length_exceeded" if len(str(body)) > 500 or body.get("max_output_tokens") == 10_000 else None
    check_error(served.post("/v1/responses", body), 400, param, code)


@pytest.mark.parametrize("field", [
    {"conversation": "conv_1"}, {"conversation": {"id": "conv_1"}}, {"prompt": {"id": "pmpt_1"}},
    {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
    {"moderation": {"model": "omni-moderation-latest"}},
    {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
    {"text": {"verbosity": "low"}},
    {"top_logprobs": 2}, {"logprobs": True}, {"prompt_logprobs": 1}, {"prompt_logprobs": 0},
])  # fmt: skip
def test_fields_that_would_change_the_response(served: Served, field: dict[str, Any]) -> None:
    (name,) = field
    param = "text.verbosity" if name == "text" else name
    check_error(served.post("/v1/responses", {"input": "a", **field}), 400, param, "unsupported_parameter")


@pytest.mark.parametrize("text", [{}, {"verbosity": "medium"}, {"format": {"type": "json_object"}}])
def test_the_text_options_of_a_response(served: Served, text: dict[str, Any]) -> None:
    response = served.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "text": text}).json()
    assert response["text"] == {"format": {"type": "text"}, **text}


def test_fields_without_effect(served: Served) -> None:
    body = {
        "input": "a",
        "max_output_tokens": 1,
        "max_tool_calls": 3,
        "context_management": [],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "top_logprobs": 0,
        "prompt_cache_options": {"mode": "explicit"},
        "background_options": {"completion_window": "soonest"},
        **dict.fromkeys(("conversation", "prompt", "moderation")),
    }
    assert served.post("/v1/responses", body).status_code == 200
    assert body.keys().isdisjoint(httpx.get(f"{served.url}/health").json()["unknown_parameters"])


def test_an_error_within_a_stream() -> None:
    with serve(step_time=0.002) as served:
        stream = served.client().responses.create(model=MODEL, input="a", stream=True)
        kinds = [next(stream).type]
        served.runner.error_for = lambda tokens: RuntimeError("no more")
        last = None
        for event in stream:
            kinds.append(event.type)
            if event.type == "error":
                assert "no more" in event.message
            last = event
        assert kinds[-2:] == ["error", "response.failed"] and "no more" in last.response.error.message  # type: ignore[union-attr]
        assert "response.completed" not in kinds


def state(size: int = 5, *, in_background: bool = False) -> ResponseState:
    return ResponseState(AskedResponse({}, [], size, {}, in_background=in_background), MODEL)


def finished(size: int = 5) -> ResponseState:
    made = state(size)
    made.status = "completed"
    return made


def test_the_store_is_bounded() -> None:
    store = ResponseStore(3, max_characters=1000)
    states = [finished() for _ in range(5)]
    for one in states:
        store.put(one)
    assert len(store) == 3
    store.get(states[2].id)  # makes state 3 the oldest
    store.put(finished())
    store.get(states[2].id)
    store.put(finished(900))
    assert len(store) == 1
    store.put(finished(2000))
    assert len(store) == 0
    nothing = ResponseStore(0)
    nothing.put(finished())
    assert len(nothing) == 0 and not nothing.num_dropped


def test_unfinished_responses_stay_stored() -> None:
    per_state = state().num_characters
    store = ResponseStore(3, max_characters=10 * per_state)
    running = [state(in_background=True) for _ in range(3)]
    for one in running:
        store.put_unfinished(one)
        store.put(finished())
    assert len(store) == 3 and all(store.get(one.id) is one for one in running)
    with pytest.raises(APIError) as info:
        store.put_unfinished(state())
    assert info.value.status_code == 503 and len(store) == 3
    running[0].status = "cancelled"
    store.put_unfinished(state())
    with pytest.raises(APIError):
        store.get(running[0].id)
    assert store.grow(running[1].id, 7 * per_state)
    assert not store.grow(running[1].id, 1)
    assert store.grow(running[1].id, -1)
    assert store.grow("unknown", 10**9)
    with pytest.raises(APIError) as info:
        ResponseStore(3, max_characters=100).put_unfinished(state(101))
    assert (info.value.status_code, info.value.param) == (400, "input")
    with pytest.raises(APIError) as info:
        ResponseStore(0).put_unfinished(state())
    assert (info.value.status_code, info.value.param) == (400, "background")


def test_the_size_of_echoed_request_fields_is_bounded() -> None:
    with serve() as served:
        tools = [{"type": "function", "name": f"f{i}", "parameters": {"type": "object"}} for i in range(3000)]
        answer = served.post("/v1/responses", {"model": MODEL, "input": "hi", "tools": tools})
        assert answer.status_code == 400 and "tools, text and metadata" in answer.json()["error"]["message"]
    assert num_characters({"a": ["bc", 1]}) == 5 * 64 + 3


def test_the_number_of_items_is_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_engine.server.openai.responses.MAX_ITEMS", 0)
    with pytest.raises(openai.BadRequestError, match="input and the responses before it have too many items"):
        served.client().responses.create(model=MODEL, input="hi")


ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], "id": "msg_0"},
    {"type": "message", "role": "assistant", "content": "b", "id": "msg_0"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "d"},
    {"role": "user", "content": "e"},
]


def test_a_text(served: Served) -> None:
    client = served.client()
    response = client.responses.create(model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=1)
    (item,) = client.responses.input_items.list(response.id)
    assert item.model_dump(include={"type", "role", "status"}) == {
        "type": "message",
        "role": "user",
        "status": "completed",
    }
    assert item.content[0].model_dump(include={"type", "text"}) == {"type": "input_text", "text": "hi"}  # type: ignore[union-attr, index]


def test_every_type(served: Served) -> None:
    client = served.client()
    response = client.responses.create(model=MODEL, input=ITEMS, max_output_tokens=1)
    listed: list[Any] = list(client.responses.input_items.list(response.id, order="asc"))
    assert [item.type for item in listed] == [item.get("type", "message") for item in ITEMS]
    ids = [item.id for item in listed]
    assert len(set(ids)) == len(ITEMS) and ids[1] == "msg_0"
    assert [one.split("_")[0] for one in ids] == ["msg", "msg", "msg", "rs", "fc", "fco", "msg"]
    assert listed[2].content[0].type == "output_text" and listed[2].content[0].text == "b"
    assert (listed[4].name, listed[5].output, listed[6].content[0].text) == ("f", "d", "e")
    assert [item.id for item in client.responses.input_items.list(response.id)] == ids[::-1]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [3, 7])
def test_pages(served: Served, order: Any, limit: int) -> None:
    client = served.client()
    response = client.responses.create(model=MODEL, input=ITEMS, max_output_tokens=1)
    url = f"{served.url}/v1/responses/{response.id}/input_items"
    whole = httpx.get(url, params={"order": order}, timeout=DEADLINE).json()
    assert (whole["object"], whole["has_more"], len(whole["data"])) == ("list", False, len(ITEMS))
    listed, after = [], None
    while True:
        params = {"order": order, "limit": limit} | ({} if after is None else {"after": after})
        one = httpx.get(url, params=params, timeout=DEADLINE).json()
        assert one.keys() == {"object", "data", "first_id", "last_id", "has_more"}
        assert (one["first_id"], one["last_id"]) == (one["data"][0]["id"], one["data"][-1]["id"])
        listed += one["data"]
        after = one["last_id"]
        if not one["has_more"]:
            break
        assert len(one["data"]) == limit
    assert listed == whole["data"]
    assert [item.id for item in client.responses.input_items.list(response.id, order=order, limit=limit)] == [
        item["id"] for item in listed
    ]
    empty = httpx.get(url, params={"order": order, "after": after}, timeout=DEADLINE).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_twenty_by_default(served: Served) -> None:
    items = [{"role": "user", "content": f"{i}"} for i in range(25)]
    response = served.client().responses.create(model=MODEL, input=items, max_output_tokens=1)  # type: ignore[arg-type]
    one = httpx.get(f"{served.url}/v1/responses/{response.id}/input_items", timeout=DEADLINE).json()
    assert len(one["data"]) == 20 and one["has_more"] and one["data"][0]["content"][0]["text"] == "24"


def test_a_conversation(served: Served) -> None:
    """The items of a continued response are the whole conversation. Sent as input, they are the same prompt."""
    client = served.client()
    first = client.responses.create(model=MODEL, input="a", max_output_tokens=3)
    second = client.responses.create(model=MODEL, input="b", previous_response_id=first.id, max_output_tokens=3)
    third = client.responses.create(model=MODEL, input=ITEMS, previous_response_id=second.id, max_output_tokens=3)
    listed: list[Any] = list(client.responses.input_items.list(third.id, order="asc"))
    assert [item.content[0].text for item in listed[:4]] == ["a", first.output_text, "b", second.output_text]
    assert listed[1].id == first.output[0].id and len(listed) == 4 + len(ITEMS)
    again = client.responses.create(model=MODEL, input=[item.model_dump() for item in listed], max_output_tokens=3)
    assert third.usage is not None and again.usage is not None
    assert again.usage.input_tokens == third.usage.input_tokens and again.output_text == third.output_text


BAD = [("limit=0", "limit"), ("limit=101", "limit"), ("limit=a", "limit"), ("order=up", "order"), ("after=x", "after")]


@pytest.mark.parametrize(("query", "param"), BAD)
def test_bad_queries(served: Served, query: str, param: str) -> None:
    response = served.client().responses.create(model=MODEL, input="hi", max_output_tokens=1)
    check_error(httpx.get(f"{served.url}/v1/responses/{response.id}/input_items?{query}", timeout=DEADLINE), 400, param)
