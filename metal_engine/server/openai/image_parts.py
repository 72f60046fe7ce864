"""Images among the content parts of chat messages."""

from __future__ import annotations

from typing import Any

from metal_engine.errors import short
from metal_engine.media.limits import MAX_IMAGES
from metal_engine.media.sources import ImageSource
from metal_engine.server.errors import invalid
from metal_engine.server.protocol import DETAILS, ChatMessage, ImageURL
from metal_engine.text.content_parts import Content, Part, joined, without_images
from metal_engine.text.message_rules import MessageRules

# Roles whose messages may contain images.
_ROLES = ("user", "tool")
_MOVED = "Images in the results of the calls:\n"


def image_sources(messages: list[ChatMessage]) -> list[ImageSource]:
    """Return the images of a chat in order, at most ``MAX_IMAGES`` + 1 of them. Takes at most some milliseconds.

    Raises:
        APIError: status 400. A part has no image or an unknown ``detail``, or the role of the message allows no images.
    """
    sources: list[ImageSource] = []
    for i, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for j, part in enumerate(message.content):
            if part.type != "image_url":
                continue
            if len(sources) > MAX_IMAGES:
                return sources
            place = f"messages[{i}].content[{j}]"
            if part.image_url is None:
                raise invalid(" is required", where=f"{place}.image_url")
            if message.role not in _ROLES:
                raise invalid(f": a message of the role {message.role} cannot contain images", where=place)
            if isinstance(part.image_url, ImageURL):
                detail = part.image_url.detail
                if detail is not None and detail not in DETAILS:
                    problem = f" must be one of {', '.join(DETAILS)}, got {short(detail)}"
                    raise invalid(problem, where=f"{place}.image_url.detail")
                sources.append(part.image_url.source(f"{place}.image_url.url"))
            else:
                sources.append(ImageSource(part.image_url, f"{place}.image_url"))
    return sources


def without_tool_images(messages: list[dict[str, Any]], rules: MessageRules) -> list[dict[str, Any]]:
    """If the chat template ignores images of tool results, move them to a user message after the results.

    Returns ``messages`` itself if nothing has to move.

    Args:
        messages: messages in the format of chat templates.
        rules: rules of the chat template.
    """
    if not any(message["role"] == "tool" and isinstance(message["content"], list) for message in messages):
        return messages
    if rules.takes_tool_images:
        return messages
    result: list[dict[str, Any]] = []
    moved: list[Part] = []
    for message in messages:
        if message["role"] == "tool":
            text, images = without_images(message["content"])
            moved += images
            message = {**message, "content": text}
        elif moved:
            content: Content = joined([_MOVED, moved], "")
            moved = []
            if message["role"] == "user":
                message = {**message, "content": joined([content, message["content"]], "\n")}
            else:
                result.append({"role": "user", "content": content})
        result.append(message)
    return [*result, {"role": "user", "content": joined([_MOVED, moved], "")}] if moved else result
