"""Mistral's tool calls: JSON in older models, a header and JSON arguments in newer ones.

[TOOL_CALLS] [{"name": "NAME", "arguments": {"city": "Rome"}}]
[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{"city": "Rome"}
"""

from __future__ import annotations

import json
import re
from typing import Any

from metal_engine.answers.tool_parsers.json_calls import decoded_calls

_NAME_AND_ID = r"\s*(?P<name>[\w.-]{1,256})\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?"
# A call's header. Some models leave out the id, some leave out ``[ARGS]`` too.
MISTRAL_CALL_HEAD = re.compile(_NAME_AND_ID + r"(?:\[ARGS\]\s*)?(?=\{)")
# The same header, also before arguments that are a JSON string.
_HEAD = re.compile(_NAME_AND_ID + r"(?:\[ARGS\]\s*(?=[{\"])|(?=\{))")
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class MistralCalls:
    """Parser of the text after one ``[TOOL_CALLS]``. Text that follows the calls is content."""

    tool_call_start = "[TOOL_CALLS]"
    tool_call_end = ""

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> list[dict[str, Any] | str]:
        """Return the calls in a text, and the text after them. Without calls, return only the text.

        Raises an exception of any type if a call is invalid.
        """
        items: list[dict[str, Any] | str] = []
        at = _SPACE.match(text).end()  # type: ignore[union-attr]  # matches anything
        if text.startswith(("[", "{"), at):
            calls, at = decoded_calls(text, at)
            items += calls
        while (head := _HEAD.match(text, at)) is not None:
            arguments, at = _DECODER.raw_decode(text, head.end())
            items.append({"name": head["name"], "arguments": arguments, "id": head["id"]})
        return [*items, text[at:]]
