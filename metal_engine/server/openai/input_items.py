"""Input items of ``/v1/responses``: their ids, and lists of them for clients."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from pydantic import BaseModel

from metal_engine.errors import short
from metal_engine.server.errors import invalid

Item = dict[str, Any]

# Prefixes of ids by type of item.
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
# Types of items that have a status.
_WITH_STATUS = ("message", "function_call", "function_call_output")


class InputItemList(BaseModel):
    """One page of a response's input items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def complete_items(given: str | list[Item], earlier: list[Item]) -> list[Item]:
    """Return the input of a request as items in OpenAI's full form, each with a type and a unique id.

    Args:
        given: input of the request. :func:`responses_protocol.input_messages` has accepted it.
        earlier: items of the conversation before the input. No new id is the id of an earlier item.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    known = {item["id"] for item in earlier}
    new_id = uuid.uuid4().hex
    completed = []
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        item_id = item.get("id")
        # Clients may send an id twice. A page after such an id would be ambiguous.
        if not isinstance(item_id, str) or not item_id or item_id in known:
            item_id = f"{_PREFIXES[kind]}_{new_id}{i}"
        known.add(item_id)
        one = {**item, "id": item_id, "type": kind}
        if kind == "message" and isinstance(item["content"], str):
            text_kind = "output_text" if item["role"] == "assistant" else "input_text"
            more: Item = {"annotations": []} if item["role"] == "assistant" else {}
            one["content"] = [{"type": text_kind, "text": item["content"], **more}]
        if kind in _WITH_STATUS and one.get("status") is None:
            one["status"] = "completed"
        completed.append(one)
    return completed


def page(items: list[Item], order: Literal["asc", "desc"], after: str | None, limit: int) -> InputItemList:
    """Return up to ``limit`` items in ``order``: the first items, or the items that follow the item with id ``after``.

    Raises:
        APIError: status 400, if no item has the id ``after``.
    """
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        start = 1 + next((i for i, item in enumerate(ordered) if item["id"] == after), -1)
        if not start:
            raise invalid(f": the response has no input item {short(after)}", where="after")
    data = ordered[start : start + limit]
    ids = [item["id"] for item in data]
    return InputItemList(
        data=data,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=start + limit < len(ordered),
    )
