"""Llama 3's tool calls: JSON objects after a mark, or as the whole content.

<|python_tag|>{"name": "NAME", "parameters": {"city": "Rome"}}; {"name": "OTHER", "parameters": {}}
"""

from __future__ import annotations

import re
from typing import Any

from metal_engine.answers.tool_parsers.json_calls import decoded_calls

_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*+;?\s*+(?=\{)")


class Llama3Calls:
    """Parser of the text after ``<|python_tag|>``, or of content that is a call. Text that follows calls is content."""

    tool_call_start = "<|python_tag|>"
    tool_call_end = ""

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> list[dict[str, Any] | str]:
        """Return the calls in a text, and the text after them.

        Raises an exception of any type if the text does not begin with a call.
        """
        items: list[dict[str, Any] | str] = []
        at = _SPACE.match(text).end()  # type: ignore[union-attr]  # matches anything
        more: re.Match[str] | None = None
        while not items or (more := _BETWEEN.match(text, at)) is not None:
            calls, at = decoded_calls(text, at if more is None else more.end())
            items += calls
        return [*items, text[at:]]
