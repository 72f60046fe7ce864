"""Messages in an order that the chat template takes: agents send system messages at any place."""

from __future__ import annotations

from typing import Any

from metal_engine.text.message_rules import MessageRules

Message = dict[str, Any]


def in_accepted_order(messages: list[Message], rules: MessageRules) -> list[Message]:
    """Messages as far as possible in the order that a template takes; the same list if it takes them as they are.

    Nothing moves to the front but system messages that stand behind the first one: what was said stays the prefix of
    what is said next, so that it is found in the cache.

    Args:
        messages: as ``template_messages`` makes them, their contents texts.
        rules: of the template.
    """
    ordered: list[Message] = []
    joined: dict[int, list[str]] = {}  # place in `ordered` -> texts of a message that others became part of
    is_changed, is_leading = False, True
    for message in messages:
        last = ordered[-1]["role"] if ordered else None
        if message["role"] != "system":
            is_leading = False
        elif not is_leading and not rules.takes_system_later:
            message = {"role": "user", "content": written_system(message["content"])}
            is_changed = True
        if message["role"] != last or not _joins(last, is_leading, rules):
            ordered.append(message)
        else:
            joined.setdefault(len(ordered) - 1, [ordered[-1]["content"]]).append(message["content"])
    for place, contents in joined.items():
        ordered[place] = {**ordered[place], "content": "\n\n".join(contents)}
    return ordered if is_changed or joined else messages


def _joins(role: str, is_leading: bool, rules: MessageRules) -> bool:
    """Whether a message becomes part of the one before it, of the same role."""
    if role == "system":
        return is_leading and not rules.takes_system_again
    return role == "user" and not rules.takes_user_again


def written_system(content: str) -> str:
    """A system message as a message of the user's can have it."""
    return f"<system>\n{content}\n</system>"
