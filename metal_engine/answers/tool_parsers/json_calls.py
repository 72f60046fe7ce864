"""Tool calls as JSON objects between marks, the format of most open models."""

from __future__ import annotations

import json
import re
from typing import Any

# Start of a call that is a JSON object, up to the call's arguments.
JSON_CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_BETWEEN = re.compile(r"[\s,;]*")
# Closing braces that models append to a complete call.
_STRAY_END = re.compile(r"[\s}]*+\Z")
# Keys that a call without arguments may have.
_LABELS = frozenset({"name", "id", "type", "index"})
_DECODER = json.JSONDecoder()


class JSONCalls:
    """Parser of calls that are JSON: one or several objects, or lists of objects."""

    tool_call_start = "<tool_call>"
    tool_call_end = "</tool_call>"

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> list[dict[str, Any]]:
        """Return the calls in a text. Raises an exception of any type if the text does not consist of calls only.

        Closing braces after the last call are ignored.
        """
        calls: list[dict[str, Any]] = []
        at = _BETWEEN.match(text).end()  # type: ignore[union-attr]  # matches anything
        while at < len(text) and not (calls and _STRAY_END.match(text, at)):
            some, at = decoded_calls(text, at)
            calls += some
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        return calls


JSON_CALLS = JSONCalls()


def decoded_calls(text: str, at: int) -> tuple[list[dict[str, Any]], int]:
    """Return the calls of the JSON value at a position in a text, and the position after the value.

    Raises:
        Exception: no JSON value starts at ``at``, or the value is not a call or a list of calls. The type varies.
    """
    value, end = _DECODER.raw_decode(text, at)
    return [_call(one) for one in (value if isinstance(value, list) else [value])], end


def _call(given: Any) -> dict[str, Any]:
    """Return a call with ``name``, ``arguments`` and ``id``. Some models write ``parameters`` for ``arguments``.

    Raises:
        Exception: ``given`` is not a call. The type varies.
    """
    keys = [key for key in ("arguments", "parameters") if key in given]
    if len(keys) > 1:
        raise ValueError("the call has both arguments and parameters")
    if not keys and not given.keys() <= _LABELS:
        raise ValueError("the call has neither arguments nor parameters")
    arguments = given[keys[0]] if keys else {}
    return {"name": given["name"], "arguments": arguments, "id": given.get("id")}
