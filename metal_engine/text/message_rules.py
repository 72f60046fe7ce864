"""Determines the orders of message roles that a chat template accepts without dropping or moving messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from metal_engine.text.chat_template import Message


class MessageRules:
    """Rules of a chat template about consecutive roles, found by rendering test conversations on first use.

    Thread-safe.

    Args:
        render: renders a conversation with the template. Raises ValueError if the template refuses the conversation.
    """

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render

    @cached_property
    def takes_system_again(self) -> bool:
        """True if a system message may follow another system message at the start of the conversation."""
        return self._takes("system", "system", "user")

    @cached_property
    def takes_system_later(self) -> bool:
        """True if a system message may follow messages of other roles, and the template leaves it there.

        A template that collects system messages at the front changes the prefix with each new one, so that no
        cached block matches.
        """
        return self._takes("system", "user", "system") and self._takes("user", "assistant", "system", "user")

    @cached_property
    def takes_user_again(self) -> bool:
        """True if a user message may follow another user message."""
        return self._takes("user", "user")

    def _takes(self, *roles: str) -> bool:
        """Return True if the template writes every message of such a conversation, in the given order."""
        messages = [{"role": role, "content": f"content{i}of{role}"} for i, role in enumerate(roles)]
        try:
            text = self._render(messages)
        except ValueError:
            return False
        places = [text.find(message["content"]) for message in messages]
        return -1 not in places and places == sorted(places)
