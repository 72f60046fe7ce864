"""Server side of the encoder inputs that the process of an engine holds. Requests with the same image share them."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from metal_engine.engine.process.packed_images import InputArrays, packed_inputs
from metal_engine.engine.process.remote import EngineCalls
from metal_engine.engine.process.wire import ImageInputs
from metal_engine.prompt_images import PromptImages

# Maximum size of the inputs that the process keeps for later requests, in bytes. A conversation has the same images in
# each turn, and the server does not send them to the process twice.
_MAX_RECENT_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class RemoteImageInputs:
    """Inputs of the encoder for an image. The process keeps them until this object is deleted."""

    key: int
    content_hash: bytes
    inputs: InputArrays

    @property
    def num_bytes(self) -> int:
        """Size of the inputs in bytes."""
        return sum(array.nbytes for array in self.inputs.values())

    @property
    def message(self) -> ImageInputs:
        """Message that sends the inputs."""
        return packed_inputs(self.key, self.inputs)


class RemoteImages:
    """Encoder inputs of the images of open and recent requests. Used while the lock of ``calls`` is held.

    Args:
        calls: sends messages, and releases inputs.
        max_recent_bytes: maximum total size in bytes of the most recently used inputs. They stay in the process when
            their requests end.
    """

    def __init__(self, calls: EngineCalls, max_recent_bytes: int = _MAX_RECENT_BYTES) -> None:
        self._calls = calls
        self._max_recent_bytes = max_recent_bytes
        self._recent: OrderedDict[bytes, RemoteImageInputs] = OrderedDict()
        self._num_recent_bytes = 0
        self._keys = itertools.count()
        self._by_hash: weakref.WeakValueDictionary[bytes, RemoteImageInputs] = weakref.WeakValueDictionary()

    def inputs_of(self, images: PromptImages | None) -> tuple[RemoteImageInputs, ...]:
        """Return the inputs of a request's images. Inputs that the process does not have are sent."""
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
            self._keep(inputs)
            found[image.content_hash] = inputs
        return tuple(found.values())

    def _keep(self, inputs: RemoteImageInputs) -> None:
        """Mark inputs as the most recent.

        Drop references to the least recent inputs while the total size of recent inputs exceeds the maximum.
        """
        if inputs.content_hash not in self._recent:
            self._recent[inputs.content_hash] = inputs
            self._num_recent_bytes += inputs.num_bytes
        self._recent.move_to_end(inputs.content_hash)
        while self._num_recent_bytes > self._max_recent_bytes:
            self._num_recent_bytes -= self._recent.popitem(last=False)[1].num_bytes

    def messages(self) -> Iterator[ImageInputs]:
        """Yield the messages that send all inputs to a new process. Each message copies the inputs of one image."""
        for inputs in list(self._by_hash.values()):
            yield inputs.message
