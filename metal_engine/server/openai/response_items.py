"""Output items of ``/v1/responses``, and the events about them in a stream."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from metal_engine.answers.deltas import AnswerDelta, ArgumentsDelta, CallStart, TextDelta

Event = dict[str, Any]

# For each kind of text: the type of its part, and additional fields of the part and of its events.
_PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "content": ("output_text", {"annotations": [], "logprobs": []}, {"logprobs": []}),
    "reasoning": ("reasoning_text", {}, {}),
}


def _part(kind: str, text: str) -> dict[str, Any]:
    name, more, _ = _PARTS[kind]
    return {"type": name, "text": text, **more}


class ResponseItems:
    """Output items, built from deltas. Methods that change them return the events about the changes.

    Only the last item can be open. Text and arguments are added to the open item.

    Args:
        namespaces: map from the full name of a function in a namespace to the pair (namespace, name in that namespace).

    Attributes:
        items: output items so far. The text of the open item is missing until :meth:`close`.
    """

    def __init__(self, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None  # kind of the last item; None after it ended
        self._text: list[str] = []

    def add(self, deltas: list[AnswerDelta]) -> list[Event]:
        """Add deltas. Return their events, without sequence numbers."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                events += self.close()
                called = {"type": "function_call", "call_id": delta.id, **self._named(delta.name), "arguments": ""}
                events.append(self._begin_item("call", "fc", called))
            elif isinstance(delta, ArgumentsDelta):
                self._text.append(delta.text)
                events.append(self._event("response.function_call_arguments.delta", delta=delta.text))
            else:
                if self._open != delta.kind:
                    events += self.close()
                    events += self._begin_text(delta)
                self._text.append(delta.text)
                events.append(self._text_event("delta", delta.kind, delta=delta.text))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """End the open item, if there is one. Return the events about its end.

        Args:
            status: status of the item. A call whose arguments are not valid JSON gets ``incomplete`` instead.
        """
        kind, self._open = self._open, None
        text = "".join(self._text)
        self._text = []
        if kind is None:
            return []
        item = self.items[-1]
        item["status"] = status
        events: list[Event] = []
        if kind == "call":
            item["arguments"] = text
            if not _is_json(text):  # cut off, or not a call
                item["status"] = "incomplete"
            events.append(self._event("response.function_call_arguments.done", arguments=text, name=item["name"]))
        else:
            item["content"] = [_part(kind, text)]
            events.append(self._text_event("done", kind, text=text))
            events.append(self._part_event("response.content_part.done", part=_part(kind, text)))
        events.append(self._item_event("response.output_item.done"))
        return events

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the items so far. The open item has the text that has arrived so far."""
        items = list(self.items)
        if self._open is not None:
            text = "".join(self._text)
            content = {"arguments": text} if self._open == "call" else {"content": [_part(self._open, text)]}
            items[-1] = {**items[-1], **content}
        return items

    def _named(self, name: str) -> dict[str, Any]:
        """Return the fields ``name`` and, for a function in a namespace, ``namespace``, as the client sent them."""
        if name not in self._namespaces:
            return {"name": name}
        namespace, own_name = self._namespaces[name]
        return {"name": own_name, "namespace": namespace}

    def _begin_text(self, delta: TextDelta) -> list[Event]:
        if delta.kind == "content":
            item = self._begin_item("content", "msg", {"type": "message", "role": "assistant", "content": []})
        else:
            item = self._begin_item("reasoning", "rs", {"type": "reasoning", "summary": [], "content": []})
        return [item, self._part_event("response.content_part.added", part=_part(delta.kind, ""))]

    def _begin_item(self, kind: str, prefix: str, item: dict[str, Any]) -> Event:
        self._open = kind
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", **item, "status": "in_progress"})
        return self._item_event("response.output_item.added")

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, content_index=0, **fields)

    def _text_event(self, change: str, kind: str, **fields: Any) -> Event:
        name, _, more = _PARTS[kind]
        return self._part_event(f"response.{name}.{change}", **fields, **more)

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True
