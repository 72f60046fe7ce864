"""The line that Claude Code puts before its system text: another one for each request, and nothing for the model."""

from __future__ import annotations

import re
from typing import Any

# Lines and blanks are bounded, so that no text takes long to search. No line has been seen that is longer than 200.
_LINES = re.compile(
    r"(?:\s{0,64}+x-anthropic-billing-header:[^\n]{0,4096}+(?:\n|\Z)){1,8}+[\r\n]{0,64}+", re.IGNORECASE
)


def without_billing_line(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat without the billing line that its system text begins with; the same object if there is none.

    The line differs from request to request, so no prefix behind it would be found in the cache. Clients of Anthropic's
    API send it as the system text's first block, and what makes OpenAI's requests of theirs as the first message's
    beginning. A message of nothing else is left out, unless it is the only one.

    Args:
        messages: at least one, as chat templates read them.
    """
    first, *others = messages
    found = _LINES.match(first["content"]) if first["role"] == "system" else None
    if found is None:
        return messages
    rest = first["content"][found.end() :]
    return [{**first, "content": rest}, *others] if rest or not others else others
