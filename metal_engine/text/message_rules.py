"""Determines the messages that a chat template accepts: orders of roles, and messages with reasoning and calls."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from metal_engine.text.chat_template import Message

_TEXT = "text of a part"
# Id of a call that all templates accept. Mistral's require nine letters and digits.
_ID, _OTHER_ID = "call12345", "call67890"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
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
        message = {"role": "assistant", "thinking": "thinking", "tool_calls": [{"id": _ID, "function": function}]}
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

    @cached_property
    def writes_calls(self) -> bool:
        """True if the template writes the calls of a message whose content is a text.

        The template of DeepSeek R1 writes only calls of messages without content.
        """
        results = self._rendered_result(_TEXT), self._rendered_result(_TEXT, arguments="{}")
        return any(result is not None and _name(_ID) in result for result in results)

    @cached_property
    def takes_several_calls(self) -> bool:
        """False if the template refuses messages with several calls, or writes only the first call of a message.

        For example, Llama 3's template refuses several calls, and gpt-oss's writes only the first call.
        """
        arguments = "{}" if self.takes_only_text_arguments else None
        if not self.writes_calls or self._rendered_result(_TEXT, arguments=arguments) is None:
            return True
        several = self._rendered_result(_TEXT, call_ids=(_ID, _OTHER_ID), arguments=arguments)
        return several is not None and _name(_OTHER_ID) in several

    @cached_property
    def takes_user_after_result(self) -> bool:
        """False if the template refuses a user message after the result of a call, as Mistral's templates do."""
        user = {"role": "user", "content": _TEXT}
        return self._rendered_result(_TEXT) is None or self._rendered_result(_TEXT, then=[user]) is not None

    @cached_property
    def takes_only_short_ids(self) -> bool:
        """True if the ids of calls must have nine characters, as in Mistral's templates."""
        return self._rendered_result(_TEXT) is not None and self._rendered_result(_TEXT, call_ids=("call_1",)) is None

    @cached_property
    def takes_only_text_arguments(self) -> bool:
        """True if the arguments of calls must be JSON text, as in DeepSeek's templates, which append it to a text."""
        return self._rendered_result(_TEXT) is None and self._rendered_result(_TEXT, arguments="{}") is not None

    @cached_property
    def takes_text_arguments(self) -> bool:
        """False if the arguments of calls must be objects, because the template reads their members."""
        return self._rendered_result(_TEXT) is None or self._rendered_result(_TEXT, arguments="{}") is not None

    def _rendered_result(
        self,
        content: str | list[dict[str, str]],
        *,
        call_ids: tuple[str, ...] = (_ID,),
        arguments: str | None = None,
        then: Sequence[Message] = (),
    ) -> str | None:
        """Return the rendered text of a conversation with ``content`` as the result of each call of a message.

        Return None if the template refuses the conversation.

        Args:
            arguments: arguments of each call as JSON text; None for an object.
            then: messages after the results.
        """
        calls: list[Message] = []
        results: list[Message] = []
        for one in call_ids:
            function = {"name": _name(one), "arguments": {} if arguments is None else arguments}
            calls.append({"id": one, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": one, "name": "function", "content": content})
        messages: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *results,
            *then,
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


def _name(call_id: str) -> str:
    return f"function_of_{call_id}"


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


def with_short_ids(messages: list[Message], rules: MessageRules) -> list[Message]:
    """Replace the ids of calls by ids of nine letters and digits, if the template requires this.

    An id always gets the same replacement, so that earlier messages stay a prefix of the next turn. If no message
    changes, the same list is returned.

    Args:
        messages: plain data from :func:`metal_engine.text.chat_template.plain_messages`. They stay unchanged.
        rules: rules of the chat template.
    """
    if not any(one.get("tool_calls") or "tool_call_id" in one for one in messages) or not rules.takes_only_short_ids:
        return messages
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_short_id(call, "id") for call in calls]}
        changed.append(_with_short_id(message, "tool_call_id"))
    return changed


def _with_short_id(given: Any, key: str) -> Any:
    """Return a call or a message with a short id under ``key``. Return it unchanged if it has no such id."""
    given_id = given.get(key) if isinstance(given, dict) else None
    if not isinstance(given_id, str) or _SHORT_ID.fullmatch(given_id):
        return given
    return {**given, key: hashlib.sha256(given_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]}


def _has_both(message: Message) -> bool:
    texts = message.get("content"), message.get("thinking")
    return all(isinstance(text, str) and text for text in texts)
