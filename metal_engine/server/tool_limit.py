"""Limits the size of a request's tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from metal_engine.json_values import num_characters
from metal_engine.server.errors import invalid

# Maximum number of characters of all tools. Templates and schemas encode all tools as JSON in one call, which takes
# 10 ms, and 40 MiB if a character is beyond U+FFFF.
MAX_TOOL_CHARACTERS = 1 << 21


def checked_tools(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as a list. Raise APIError, a 400, if they have too many characters together.

    Reads ``tools`` only up to the tool that exceeds the limit. Ten thousand tools at once would take long to free, and
    the garbage collector would block all threads while it scans them.
    """
    checked = []
    left = MAX_TOOL_CHARACTERS
    for tool in tools:
        left -= num_characters(tool)
        if left < 0:
            problem = f" may have {MAX_TOOL_CHARACTERS} characters together, where each value counts 64 more"
            raise invalid(problem, where="tools")
        checked.append(tool)
    return checked
