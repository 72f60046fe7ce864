"""The line that Claude Code puts before its system text: another one for each request, and nothing for the model."""

from __future__ import annotations

from typing import Any

BILLING_HEADER = "x-anthropic-billing-header:"

System = str | list[dict[str, Any]] | None


def without_billing_line(system: System) -> System:
    """The system text of a request without the billing line that it begins with; the same object if there is none.

    The line differs from request to request, so no prefix behind it would be found in the cache.

    Args:
        system: a text, or blocks; the first text blocks may each begin with such a line, or be one.
    """
    if isinstance(system, str):
        return _rest(system)
    blocks = system or []
    dropped = 0
    while dropped < len(blocks) and _begins_with_line(blocks[dropped]):
        rest = _rest(blocks[dropped]["text"])
        if rest:
            return [{**blocks[dropped], "text": rest}, *blocks[dropped + 1 :]]
        dropped += 1
    return blocks[dropped:] if dropped else system


def _begins_with_line(block: dict[str, Any]) -> bool:
    text = block.get("text")
    return block.get("type") == "text" and isinstance(text, str) and text.startswith(BILLING_HEADER)


def _rest(text: str) -> str:
    """What follows the line and its line breaks; the text itself if it does not begin with one."""
    if not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\r\n")
