"""Cache of processed images: clients send all images of a conversation again in every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metal_engine.media.families.base import Grid
from metal_engine.media.limits import MAX_INPUT_BYTES

# Maximum number of files whose grids are kept. Each takes some hundred bytes.
_MAX_FILES = 1 << 12
# Maximum size of the inputs that are kept, in bytes: the images of the largest conversation.
_MAX_INPUT_BYTES = MAX_INPUT_BYTES

Inputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """Image whose number of tokens is known.

    Attributes:
        content_hash: hash of the grid and the inputs. May be empty if ``inputs`` is None.
        grid: numbers that determine the image's tokens, as in
            :class:`metal_engine.media.families.base.ImageProcessorFamily`.
        inputs: inputs of the vision encoder by name. None if only the header was read, because the images of the
            request have too many tokens, or because the request only counts tokens. Also None if the store has dropped
            the inputs.
    """

    content_hash: bytes
    grid: Grid
    inputs: Inputs | None


class ImageStore:
    """LRU cache of the grids of image files, and of the vision encoder's inputs. Thread-safe.

    The key of a grid is the hash of the file. The key of inputs is the content hash, because different files can have
    the same inputs.
    """

    def __init__(self, max_input_bytes: int = _MAX_INPUT_BYTES) -> None:
        self._max_input_bytes = max_input_bytes
        self._files: OrderedDict[bytes, tuple[Grid, bytes]] = OrderedDict()
        self._inputs: OrderedDict[bytes, Inputs] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of the inputs that are kept, in bytes."""
        return self._num_bytes

    def find(self, file: bytes) -> LoadedImage | None:
        """Return the image of a file, by the hash of the file; None for an unknown file.

        The image has no inputs if they were dropped.
        """
        with self._lock:
            if file not in self._files:
                return None
            self._files.move_to_end(file)
            grid, content_hash = self._files[file]
            if content_hash in self._inputs:
                self._inputs.move_to_end(content_hash)
            return LoadedImage(content_hash, grid, self._inputs.get(content_hash))

    def add(self, file: bytes, image: LoadedImage) -> LoadedImage:
        """Store the image of a file. Return the image, with the stored inputs in place of equal inputs.

        Args:
            file: hash of the file.
            image: image of the file. Without inputs, it does not replace a stored image.
        """
        with self._lock:
            if image.inputs is None and file in self._files:
                return image
            self._files[file] = image.grid, image.content_hash
            self._files.move_to_end(file)
            while len(self._files) > _MAX_FILES:
                self._files.popitem(last=False)
            if image.inputs is None:
                return image
            if image.content_hash not in self._inputs:
                self._inputs[image.content_hash] = image.inputs
                self._num_bytes += size_of(image.inputs)
            kept = self._inputs[image.content_hash]
            self._inputs.move_to_end(image.content_hash)
            while self._num_bytes > self._max_input_bytes:
                self._num_bytes -= size_of(self._inputs.popitem(last=False)[1])
            return LoadedImage(image.content_hash, image.grid, kept)


def size_of(inputs: Inputs) -> int:
    """Return the size of encoder inputs in bytes."""
    return sum(array.nbytes for array in inputs.values())
