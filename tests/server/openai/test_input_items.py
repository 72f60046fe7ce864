"""The input items of stored responses: their form, their ids, and pages of them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.test_errors import check_error
from tests.support.serving import DEADLINE, MODEL, Served

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
    url = f"{served.url}/v1/responses/{response.id}/input_items?{query}"
    check_error(httpx.get(url, timeout=DEADLINE), 400, param)
