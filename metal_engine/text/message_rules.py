"""In which order a chat template takes messages: some refuse, or leave out, what others write as it comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from metal_engine.text.chat_template import Message


class MessageRules:
    """What a template makes of roles that follow each other, found by trying it when first asked. Thread-safe.

    Args:
        render: writes a conversation as the template does. Raises ValueError for one that the template refuses.
    """

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render

    @cached_property
    def takes_system_again(self) -> bool:
        """Whether a system message may follow another one at the beginning."""
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
        """Whether a user's message may follow another one."""
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
