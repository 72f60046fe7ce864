"""Server side of the inputs of images in the process of an engine. Requests with the same image share them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from metal_engine.engine.process.packed_images import InputArrays, packed_inputs
from metal_engine.engine.process.remote import Calls
from metal_engine.engine.process.wire import ImageInputs
from metal_engine.images import PromptImages


@dataclass(frozen=True, eq=False)
class RemoteImageInputs:
    """Inputs of the encoder for an image. The process holds them until the last request that uses them is dropped."""

    key: int
    content_hash: bytes
    inputs: InputArrays

    @property
    def message(self) -> ImageInputs:
        """Message that sends the inputs."""
        return packed_inputs(self.key, self.inputs)


class RemoteImages:
    """Inputs of images of all requests, by content hash. Used while the lock of ``calls`` is held.

    Args:
        calls: sends messages, and releases inputs.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._keys = itertools.count()
        self._by_hash: weakref.WeakValueDictionary[bytes, RemoteImageInputs] = weakref.WeakValueDictionary()

    def inputs_of(self, images: PromptImages | None) -> tuple[RemoteImageInputs, ...]:
        """Return the inputs of a request's images. Inputs that no other request uses are sent to the process."""
        found: dict[bytes, RemoteImageInputs] = {}
        for image in () if images is None else images.images:
            if image.content_hash in found:
                continue
            inputs = self._by_hash.get(image.content_hash)
            if inputs is None:
                inputs = RemoteImageInputs(next(self._keys), image.content_hash, image.inputs)
                self._by_hash[image.content_hash] = inputs
                weakref.finalize(inputs, self._calls.dropped_images.append, inputs.key).atexit = False
                self._calls.send(inputs.message)
            found[image.content_hash] = inputs
        return tuple(found.values())

    def messages(self) -> Iterator[ImageInputs]:
        """Yield the messages that a new process needs. Each has a copy of an image's inputs."""
        for inputs in list(self._by_hash.values()):
            yield inputs.message
