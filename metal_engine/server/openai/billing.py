"""Removes the line that Claude Code adds before its system text.

It differs in each request, and the model does not need it.
"""

from __future__ import annotations

import re
from typing import Any

# The numbers of lines and blanks are limited, to limit the search time. Lines seen so far have at most 200 characters.
_LINES = re.compile(
    r"(?:\s{0,64}+x-anthropic-billing-header:[^\n]{0,4096}+(?:\n|\Z)){1,8}+[\r\n]{0,64}+", re.IGNORECASE
)


def without_billing_line(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat without the billing line at the start of its system text; the same object if there is none.

    The line differs in each request, so the prefix cache could not match anything after it. Clients of Anthropic's API
    send it as the first block of the system text. Proxies that convert their requests for OpenAI's API put it at the
    start of the first message. An empty message is removed, unless the chat has no other.

    Args:
        messages: at least one message, in the format of chat templates.
    """
    first, *others = messages
    found = _LINES.match(first["content"]) if first["role"] == "system" else None
    if found is None:
        return messages
    rest = first["content"][found.end() :]
    return [{**first, "content": rest}, *others] if rest or not others else others
