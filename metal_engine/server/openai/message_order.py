"""Converts messages to a sequence of roles that a chat template accepts.

Agents send system messages at any place, and several messages of one role in succession.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from metal_engine.text.content_parts import Content, joined
from metal_engine.text.message_rules import MessageRules

Message = dict[str, Any]


def in_accepted_order(messages: list[Message], rules: MessageRules) -> list[Message]:
    """Return messages with a sequence of roles that the chat template accepts, as far as possible.

    If the template does not accept them, consecutive messages of a role are joined, and a user message after the result
    of a call is joined to the result. A system message after messages of other roles becomes user text at its place if
    the template accepts system messages only at the start. No message moves. Therefore, earlier messages remain a
    prefix of the next turn, and the prefix cache still matches.

    Args:
        messages: result of ``template_messages``. The content of its system messages is text.
        rules: rules of the chat template.

    Returns:
        The messages; ``messages`` itself if nothing changes.
    """
    ordered: list[Message] = []
    together: dict[int, list[Content]] = {}  # index in `ordered` -> contents of the message and those joined to it
    is_changed, is_leading = False, True
    for message in messages:
        last = ordered[-1]["role"] if ordered else None
        if message["role"] != "system":
            is_leading = False
        elif not is_leading and not rules.takes_system_later:
            message = {"role": "user", "content": written_system(message["content"])}
            is_changed = True
        if not _joins(message["role"], last, is_leading, rules):
            ordered.append(message)
        else:
            together.setdefault(len(ordered) - 1, [ordered[-1]["content"]]).append(message["content"])
    for place, contents in together.items():
        ordered[place] = {**ordered[place], "content": joined(contents, "\n\n")}
    return ordered if is_changed or together else messages


def with_single_calls(messages: list[Message], rules: MessageRules) -> list[Message]:
    """Split messages with several calls if the template does not accept them.

    Each call then has its own message, followed by the results of the call. The first of these messages has the content
    and the reasoning.

    Args:
        messages: messages for a template that supports calls.
        rules: rules of the chat template.

    Returns:
        The messages; ``messages`` itself if nothing changes.
    """
    if not any(len(one.get("tool_calls", ())) > 1 for one in messages) or rules.takes_several_calls:
        return messages
    split: list[Message] = []
    waiting: dict[Any, list[Message]] = {}  # id of a call -> message of the call, and results
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in waiting:
            waiting[message["tool_call_id"]].append(message)
            continue
        split += chain.from_iterable(waiting.values())
        waiting = {}
        if len(calls := message.get("tool_calls", ())) < 2:
            split.append(message)
            continue
        for i, call in enumerate(calls):
            own = {"role": "assistant", "content": ""} if i else message
            call_id = call["id"] if isinstance(call.get("id"), str) else i
            waiting.setdefault(call_id, []).append({**own, "tool_calls": [call]})
    return [*split, *chain.from_iterable(waiting.values())]


def _joins(role: str, last: str | None, is_leading: bool, rules: MessageRules) -> bool:
    """Return True if a message of ``role`` must be joined to the message of the role ``last`` before it.

    Args:
        is_leading: True if the conversation has only system messages so far.
    """
    if role == "user" and last == "tool":
        return not rules.takes_user_after_result
    if role != last:
        return False
    if role == "system":
        return is_leading and not rules.takes_system_again
    return role == "user" and not rules.takes_user_again


def written_system(content: str) -> str:
    """Format a system message as a part of a user message."""
    return f"<system>\n{content}\n</system>"
