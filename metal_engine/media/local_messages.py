"""Finds the images in the messages of a local caller, who may name files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from metal_engine.errors import short
from metal_engine.media.decoder_client import ImageError
from metal_engine.media.image_preparer import ImagePreparer
from metal_engine.media.sources import ImageSource
from metal_engine.prompt_images import PromptImages
from metal_engine.settings.config import EngineConfig

Message = dict[str, Any]
# Names under which callers of `transformers` give the file of a part of the type image.
_FILES = ("image", "url", "path")


def split_images(messages: Sequence[Message]) -> tuple[list[Message], list[ImageSource]]:
    """Return the messages in the form for a chat template, and their images in order.

    An image is a part ``{"type": "image_url", "image_url": {"url": ...}}``, or ``{"type": "image", "image": ...}`` as
    in ``transformers``. The value is a path, or a URL with ``file:`` or ``data:``. The returned messages have
    ``{"type": "image"}`` in place of each image.

    Raises:
        ValueError: the type of a part is not supported, or an image part has no local image.
    """
    result: list[Message] = []
    sources: list[ImageSource] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = []
            for j, part in enumerate(content):
                kind = part.get("type") if isinstance(part, Mapping) else "text"
                is_image = kind in ("image", "image_url")
                if not is_image and kind != "text":
                    problem = f": content of type {short(kind)} is not supported; send text and images (image_url)"
                    raise ValueError(f"messages[{i}].content[{j}]{problem}")
                if is_image:
                    sources.append(_source(part, f"messages[{i}].content[{j}]"))
                parts.append({"type": "image"} if is_image else part)
            message = {**message, "content": parts}
        result.append(message)
    return result, sources


def insert_images(
    preparer: ImagePreparer | None, prompt: list[int], sources: Sequence[ImageSource], config: EngineConfig
) -> tuple[list[int], PromptImages | None]:
    """Load the images of a prompt and insert their tokens into the prompt.

    Args:
        preparer: prepares images for the model; None if the model takes no images.
        prompt: token ids with a placeholder for each image.
        sources: image files in the order of the placeholders.
        config: configuration of the engine.

    Returns:
        Token ids of the prompt, and the images. Without ``sources``, the prompt itself and None.

    Raises:
        ValueError: an image cannot be used, or the model takes no images.
        PromptError: the chat template did not write one placeholder for each image.
        OverloadedError: the images of all requests take too much memory, or no process can be started.
    """
    if not sources:
        return prompt, None
    if preparer is None:
        raise ValueError(f"{sources[0].place}: images are not supported: {config.model.image_refusal}")
    try:
        images = preparer.load(sources, allows_files=True, max_tokens=config.scheduler.max_model_len)
    except ImageError as error:
        raise ValueError(f"{sources[error.index].place}{error.message}") from error
    return preparer.insert(prompt, images)


def _source(part: Mapping[str, Any], place: str) -> ImageSource:
    names = ("image_url",) if part["type"] == "image_url" else _FILES
    given: Any = next((part[name] for name in names if part.get(name) is not None), None)
    detail = part.get("detail")
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail")
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"{place} has no image: it needs the path or the data URL of a file")
    if str(given).lower().startswith(("http://", "https://")):
        raise ValueError(f"{place}: images are not downloaded here; give the path of a file, or a data URL")
    return ImageSource(os.fspath(given), place, "low" if detail == "low" else "high")
