"""Remembers images by the hash of their files, because a conversation sends its images again in every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from metal_engine.media.families.base import Grid
from metal_engine.media.limits import MAX_INPUT_BYTES

# Maximum number of images whose grids are kept. Each takes some hundred bytes.
_MAX_GRIDS = 1 << 12
# Maximum size of the inputs that are kept, in bytes: the images of the largest conversation.
_MAX_INPUT_BYTES = MAX_INPUT_BYTES

Inputs = Mapping[str, np.ndarray]


class ImageStore:
    """Grids and encoder inputs of images, by their content hashes. The least recently used are dropped. Thread-safe."""

    def __init__(self, max_input_bytes: int = _MAX_INPUT_BYTES) -> None:
        self._max_input_bytes = max_input_bytes
        self._grids: OrderedDict[bytes, Grid] = OrderedDict()
        self._inputs: OrderedDict[bytes, Inputs] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of the inputs that are kept, in bytes."""
        return self._num_bytes

    def grid(self, content_hash: bytes) -> Grid | None:
        """Return the grid of an image; None for an unknown image."""
        with self._lock:
            if content_hash in self._grids:
                self._grids.move_to_end(content_hash)
            return self._grids.get(content_hash)

    def inputs(self, content_hash: bytes) -> Inputs | None:
        """Return the encoder inputs of an image; None if they were dropped."""
        with self._lock:
            if content_hash in self._inputs:
                self._inputs.move_to_end(content_hash)
            return self._inputs.get(content_hash)

    def add(self, content_hash: bytes, grid: Grid, inputs: Inputs | None) -> None:
        """Keep the grid of an image, and its inputs if they are given."""
        with self._lock:
            self._grids[content_hash] = grid
            self._grids.move_to_end(content_hash)
            while len(self._grids) > _MAX_GRIDS:
                self._grids.popitem(last=False)
            if inputs is None or content_hash in self._inputs:
                return
            self._inputs[content_hash] = inputs
            self._num_bytes += size_of(inputs)
            while self._num_bytes > self._max_input_bytes:
                self._num_bytes -= size_of(self._inputs.popitem(last=False)[1])


def size_of(inputs: Inputs) -> int:
    """Return the size of encoder inputs in bytes."""
    return sum(array.nbytes for array in inputs.values())
