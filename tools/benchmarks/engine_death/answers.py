"""Answers of servers in a form that does not depend on the division of a stream into events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

# Fields that differ between two answers to a request, that each event of a stream repeats, or that depend on the cache.
# Ranks of unlikely tokens depend on rounding. Their log probabilities are compared.
_IGNORED = {
    *("id", "item_id", "call_id", "response_id", "sequence_number", "object", "role", "model", "type", "obfuscation"),
    *("created", "created_at", "completed_at", "total_duration", "load_duration", "rank"),
    *("prompt_eval_duration", "eval_duration", "cached_tokens", "prompt_tokens_details", "input_tokens_details"),
    *("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
}  # fmt: skip
# Largest difference of log probabilities: a token's logits depend slightly on the batch that computes them.
TOLERANCE = 1e-2

Parts = dict[str, Any]


def events_of(line: str) -> list[Any]:
    """Return a list with the JSON object in a line of a response, with or without ``data: `` before it.

    Return an empty list if the line has no object.
    """
    text = line.removeprefix("data: ")
    return [json.loads(text)] if text[:1] == "{" else []


def error_of(event: Any) -> str | None:
    """Return the error of an event as JSON text; None if the event does not report an error."""
    response = event.get("response")  # a text in Ollama's API
    error = event.get("error") or (response.get("error") if isinstance(response, dict) else None)
    if error or event.get("type") in ("error", "response.failed"):
        return json.dumps(error or event)
    return None


def is_end(event: Any) -> bool:
    """Return True if an event occurs only near the end of a complete answer, so that a cut answer lacks it."""
    kinds = ("response.completed", "response.incomplete", "message_stop", "message")
    ends = [choice.get("finish_reason") for choice in event.get("choices", ())]
    return event.get("type") in kinds or event.get("done") is True or any(ends) or "usage" in event


def merged(events: Iterable[Any]) -> Parts:
    """Return the values of an answer by their places in the JSON of its events, such as ``.choices[0].delta.content``.

    Texts at the same place of several events are joined. For values of other types at the same place, the last value is
    kept. If the path to a place contains a list whose elements have no ``index``, the result for the place is a list of
    all values. Fields in ``_IGNORED`` are left out.
    """
    leaves: dict[str, list[Any]] = {}

    def add(value: Any, place: str) -> None:
        if isinstance(value, dict):
            kind = f"{place}<{value['type']}>" if isinstance(value.get("type"), str) else place
            for key, inner in value.items():
                if key not in _IGNORED:
                    add(inner, f"{kind}.{key}")
        elif isinstance(value, list):
            for inner in value:
                index = inner.get("index", "*") if isinstance(inner, dict) else "*"
                add(inner, f"{place}[{index}]")
        elif value is not None:
            leaves.setdefault(place, []).append(value)

    for event in events:
        add(event, "")
    return {place: _one(place, values) for place, values in leaves.items()}


def _one(place: str, values: list[Any]) -> Any:
    if "[*]" in place:
        return values
    return "".join(values) if all(isinstance(value, str) for value in values) else values[-1]


def difference(ours: Parts, theirs: Parts) -> str:
    """Return a description of the first difference between two answers; an empty text if there is none.

    Floats may differ by ``TOLERANCE``.

    Args:
        ours: answer under deaths.
        theirs: undisturbed answer.
    """
    for place in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(place), theirs.get(place)
        if a != b and not _is_close(a, b):
            return f"{place}: {_short(a)}, and {_short(b)} undisturbed"
    return ""


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, abs_tol=TOLERANCE)
    return bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-90:]}"
