"""Tools in OpenAI's form, and a call of each."""

from __future__ import annotations

from typing import Any

_PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "exact": {"type": "boolean"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city"]},
        },
    }
    for name in ("get_weather", "find_trains")
]

Call = tuple[str, dict[str, Any]]
WEATHER: Call = ("get_weather", {"city": "Zürich 😀", "days": 3})
TRAINS: Call = ("find_trains", {"city": "Rome"})
