"""Contents of chat messages in the format of chat templates: a text, or a list of text and image parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

Part = dict[str, Any]
Content = str | list[Part]

IMAGE: Part = {"type": "image"}


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def joined(contents: Iterable[Content], separator: str) -> Content:
    """Join contents with a separator. The result is a text if all contents are texts, otherwise a list of parts."""
    given = list(contents)
    if all(isinstance(content, str) for content in given):
        return separator.join(given)  # type: ignore[arg-type]
    parts: list[Part] = []
    for i, content in enumerate(given):
        if i and separator:
            parts.append(text_part(separator))
        parts += [text_part(content)] if isinstance(content, str) else content
    return merged(parts, "")


def without_images(content: Content) -> tuple[str, list[Part]]:
    """Return the text of a content, joined without separators, and its image parts."""
    if isinstance(content, str):
        return content, []
    texts = [part["text"] for part in content if part["type"] == "text"]
    return "".join(texts), [part for part in content if part["type"] == "image"]


def as_parts(content: Content) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content


def merged(parts: list[Part], separator: str) -> list[Part]:
    """Join consecutive texts with a separator, because some chat templates write something between parts."""
    result: list[Part] = []
    for kind, group in groupby(parts, key=lambda part: part["type"]):
        if kind == "text":
            result.append(text_part(separator.join(part["text"] for part in group)))
        else:
            result += group
    return result
