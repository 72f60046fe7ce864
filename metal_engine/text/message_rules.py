"""Determines the messages that a chat template accepts: orders of roles, and messages with reasoning and calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from metal_engine.text.chat_template import Message

_TEXT = "text of a part"
# Text in the output of a template that writes a list of parts as Python spells it, without reading the parts.
_LIST = "'type'"


class MessageRules:
    """Rules of a chat template, found by rendering test conversations on first use.

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
        """True if a system message may follow messages of other roles, and the template keeps its position.

        Some templates move all system messages to the front. A new system message then changes the start of the prompt,
        so that no cached block matches.
        """
        return self._takes("system", "user", "system") and self._takes("user", "assistant", "system", "user")

    @cached_property
    def takes_user_again(self) -> bool:
        """True if a user message may follow another user message."""
        return self._takes("user", "user")

    @cached_property
    def takes_content_or_thinking(self) -> bool:
        """True if a message with calls may not have both content and ``thinking``, as in gpt-oss's template."""
        function = {"name": "function", "arguments": {}}
        message = {"role": "assistant", "thinking": "thinking", "tool_calls": [{"id": "call", "function": function}]}
        return self._renders({**message, "content": ""}) and not self._renders({**message, "content": "content"})

    @cached_property
    def needs_parts(self) -> bool:
        """True if the template writes contents that are lists of parts, but leaves out contents that are texts."""
        return not self._takes("user") and self._writes_text([{"type": "text", "text": _TEXT}])

    @cached_property
    def takes_tool_images(self) -> bool:
        """True if the template writes images in the results of calls."""
        text = [{"type": "text", "text": _TEXT}]
        with_image = self._rendered_result([*text, {"type": "image"}])
        return with_image is not None and _LIST not in with_image and with_image != self._rendered_result(text)

    def _rendered_result(self, content: list[dict[str, str]]) -> str | None:
        """Return the rendered text of a conversation with ``content`` as the result of a call.

        Return None if the template refuses the conversation.
        """
        call = {"id": "call", "type": "function", "function": {"name": "function", "arguments": {}}}
        messages: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call", "name": "function", "content": content},
        ]
        try:
            return self._render(messages)
        except ValueError:
            return None

    def _writes_text(self, content: list[dict[str, str]]) -> bool:
        try:
            text = self._render([{"role": "user", "content": content}])
        except ValueError:
            return False
        return _TEXT in text and _LIST not in text

    def _renders(self, answer: Message) -> bool:
        """Return True if the template accepts a user message that is followed by ``answer``."""
        try:
            self._render([{"role": "user", "content": "question"}, answer])
        except ValueError:
            return False
        return True

    def _takes(self, *roles: str) -> bool:
        """Return True if the template writes every message of a conversation with these roles, in the given order."""
        messages = [{"role": role, "content": f"content{i}of{role}"} for i, role in enumerate(roles)]
        try:
            text = self._render(messages)
        except ValueError:
            return False
        places = [text.find(message["content"]) for message in messages]
        return -1 not in places and places == sorted(places)


def with_content_as_thinking(messages: list[Message], rules: MessageRules) -> list[Message]:
    """Move the content of messages with calls to the end of their reasoning, if the template requires this.

    Only messages with both content and reasoning change, and only for a template with
    :attr:`MessageRules.takes_content_or_thinking`. If no message changes, the same list is returned.

    Args:
        messages: plain data from :func:`metal_engine.text.chat_template.plain_messages`. They stay unchanged.
        rules: rules of the chat template.
    """
    places = [i for i, message in enumerate(messages) if message.get("tool_calls") and _has_both(message)]
    if not places or not rules.takes_content_or_thinking:
        return messages
    changed = list(messages)
    for i in places:
        thinking = f"{messages[i]['thinking']}\n\n{messages[i]['content']}"
        changed[i] = {**messages[i], "content": "", "thinking": thinking}
    return changed


def _has_both(message: Message) -> bool:
    texts = message.get("content"), message.get("thinking")
    return all(isinstance(text, str) and text for text in texts)
