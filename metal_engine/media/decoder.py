"""Parent side of the processes that decode images."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from metal_engine.cancellation import check_cancelled
from metal_engine.errors import OverloadedError
from metal_engine.forks.channel import LENGTH, framed
from metal_engine.forks.forking_process import ForkError, ForkingProcess, receive_into, receive_patiently
from metal_engine.media.families.base import Grid
from metal_engine.media.limits import MAX_LIVE_BYTES
from metal_engine.settings.config import VisionConfig

# Maximum number of requests whose images are decoded at once. Each takes one core.
_MAX_DECODING = 2
# Maximum number of requests that wait for it.
_MAX_WAITING = 64
# Interval at which a waiting request checks for cancellation.
_POLL_SECONDS = 0.02
_TOO_MUCH = " exceeds the limits on time and memory for decoding"


class ImageError(ValueError):
    """An image of a request that cannot be used.

    Attributes:
        index: index of the image in the request.
        message: description of the fault, to append to the place of the image. Begins with a space or a colon.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(f"image {index}{message}")
        self.index = index
        self.message = message


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """An image after its header was read.

    Attributes:
        grid: numbers that determine the image's tokens (:class:`metal_engine.media.families.base.ImageFamily`).
        inputs: inputs of the encoder; None if they were not requested, or the images have too many tokens.
    """

    grid: Grid
    inputs: dict[str, np.ndarray] | None


class ImageDecoder:
    """Decodes the images of requests in processes of their own. Thread-safe.

    Args:
        vision: configuration of the model.
    """

    def __init__(self, vision: VisionConfig) -> None:
        self._process = ForkingProcess("metal_engine.media.process", [msgspec.json.encode(vision)])
        self._permits = threading.Semaphore(_MAX_DECODING)
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._counts: deque[int] = deque([0])  # their sum is the size of the inputs in use

    def decode(
        self, files: Sequence[bytes], details: Sequence[str], *, wants_inputs: bool, max_tokens: int
    ) -> list[DecodedImage]:
        """Decode the images of a request.

        Args:
            files: contents of image files.
            details: ``high`` or ``low`` for each file.
            wants_inputs: False to read the headers only.
            max_tokens: maximum number of tokens of all images together. Images beyond it have no inputs.

        Raises:
            ImageError: an image cannot be used.
            OverloadedError: too many requests with images wait or run, or no process can be started.
            Cancelled: the request was cancelled.
        """
        with self._lock:
            if self.num_live_bytes > MAX_LIVE_BYTES:
                raise OverloadedError(f"the images of other requests take {self.num_live_bytes >> 20} MiB of memory")
            if self._num_waiting >= _MAX_WAITING:
                raise OverloadedError(f"{self._num_waiting} other requests wait for their images to be decoded")
            self._num_waiting += 1
        try:
            while not self._permits.acquire(timeout=_POLL_SECONDS):
                check_cancelled()
        finally:
            with self._lock:
                self._num_waiting -= 1
        try:
            with self._connect() as channel:
                asked = {"details": list(details), "wants_inputs": wants_inputs, "max_tokens": max_tokens}
                with contextlib.suppress(OSError):  # if the process has ended, the first answer is missing
                    channel.sendall(framed(json.dumps(asked).encode()))
                    for data in files:
                        channel.sendall(LENGTH.pack(len(data)))  # framed() would copy the file
                        channel.sendall(data)
                decoded = _answers(channel, len(files), wants_inputs, max_tokens)
        finally:
            self._permits.release()
        for image in decoded:
            for array in (image.inputs or {}).values():
                self._count(array.nbytes)
                weakref.finalize(array, self._count, -array.nbytes)
        return decoded

    def _count(self, num_bytes: int) -> None:
        self._counts.append(num_bytes)

    @property
    def num_live_bytes(self) -> int:
        """Size of all inputs that are still in use, in bytes."""
        while len(self._counts) > 1:  # appending is atomic, so arrays may be freed in any thread
            self._counts.append(self._counts.popleft() + self._counts.popleft())
        return self._counts[0]

    def _connect(self) -> socket.socket:
        try:
            return self._process.connect()
        except ForkError as error:
            check_cancelled()
            raise OverloadedError(f"images cannot be decoded: no process can be started: {error}") from error

    def close(self) -> None:
        """End the process that has loaded the image processor, and abort calls that wait for it."""
        self._process.close()


def _answers(channel: socket.socket, num_images: int, wants_inputs: bool, max_tokens: int) -> list[DecodedImage]:
    answers = [_answer(channel, i) for i in range(num_images)]
    grids = [tuple(answer["grid"]) for answer in answers]
    if not wants_inputs or answers[-1]["num_tokens"] > max_tokens:
        return [DecodedImage(grid, None) for grid in grids]
    return [DecodedImage(grid, _inputs(channel, i)) for i, grid in enumerate(grids)]


def _answer(channel: socket.socket, index: int) -> dict[str, Any]:
    message = receive_patiently(channel)
    if message is None:
        raise ImageError(index, _TOO_MUCH)
    if not message.startswith(b"{"):  # the process could not fork
        raise OverloadedError(f"images {message.decode()}")
    answer: dict[str, Any] = json.loads(message)
    if "error" in answer:
        raise ImageError(answer["index"], f" {answer['error']}")
    return answer


def _inputs(channel: socket.socket, index: int) -> dict[str, np.ndarray]:
    arrays = {}
    for name, kind, shape in _answer(channel, index)["arrays"]:
        arrays[name] = np.empty(shape, kind)  # not filled: zeros for 30 MB would hold the GIL for long
        if not receive_into(arrays[name].reshape(-1).view(np.uint8).data, channel):
            raise ImageError(index, _TOO_MUCH)
    return arrays
