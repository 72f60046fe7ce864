"""Parent side of the processes that decode images."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from metal_engine.cancellation import check_cancelled
from metal_engine.errors import OverloadedError
from metal_engine.forks.channel import LENGTH, framed
from metal_engine.forks.forking_process import ForkError, ForkingProcess, receive_into, receive_patiently
from metal_engine.media.fair_queue import FairQueue
from metal_engine.media.families.base import Grid
from metal_engine.media.limits import MAX_INPUT_BYTES, MAX_LIVE_BYTES, REQUEST_CPU_SECONDS
from metal_engine.settings.config import VisionConfig

# Maximum number of images that are decoded at once. Each takes one core.
_MAX_DECODING = 2
_TOO_MUCH = " exceeds the limits on time and memory for decoding"


class ImageError(ValueError):
    """An image of a request that cannot be used.

    Attributes:
        index: index of the image in the request.
        message: description of the fault, to append to the path of the image in the request. Begins with a space or a
            colon.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(f"image {index}{message}")
        self.index = index
        self.message = message


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """Image whose number of tokens is known. Only its header was read if ``inputs`` is None.

    Attributes:
        grid: numbers that determine the image's tokens, as in
            :class:`metal_engine.media.families.base.ImageProcessorFamily`.
        num_tokens: number of the image's feature tokens.
        inputs: inputs of the vision encoder by name; None if the images of the request up to and including this one
            have too many tokens.
        content_hash: hash of the grid and the inputs; empty without inputs.
    """

    grid: Grid
    num_tokens: int
    inputs: dict[str, np.ndarray] | None = None
    content_hash: bytes = b""


class ImageDecoder:
    """Decodes the images of requests in processes of their own. Thread-safe.

    Requests take turns: a request with many slow files must not delay the images of other requests.

    Args:
        vision: configuration of the model.
    """

    def __init__(self, vision: VisionConfig) -> None:
        self._process = ForkingProcess("metal_engine.media.decoder_process", [msgspec.json.encode(vision)])
        self._turns = FairQueue(_MAX_DECODING)
        self._lock = threading.Lock()
        self._counts: deque[int] = deque([0])  # their sum is the size of the inputs in use

    def decode(self, files: Sequence[bytes], details: Sequence[str], *, max_tokens: int) -> list[DecodedImage]:
        """Decode the images of a request.

        Args:
            files: contents of image files.
            details: ``high`` or ``low`` for each file.
            max_tokens: maximum number of tokens of all images together. An image that exceeds it is not decoded: only
                its header is read. 0: read only the headers.

        Raises:
            ImageError: an image cannot be used.
            OverloadedError: the images of all requests take too much memory, or no process can be started.
            Cancelled: the request was cancelled.
        """
        with contextlib.closing(_Work(self._connect, self._turns)) as work:
            decoded = []
            sizes: dict[bytes, int] = {}
            for i, (data, detail) in enumerate(zip(files, details, strict=True)):
                self._check_memory()
                decoded.append(image := work.decode(i, data, detail, max_tokens))
                max_tokens -= image.num_tokens
                sizes[image.content_hash] = self._count(image)
                check_size(i, sizes)
            return decoded

    def _check_memory(self) -> None:
        with self._lock:
            num_bytes = self.num_live_bytes
        if num_bytes > MAX_LIVE_BYTES:
            raise OverloadedError(f"the images of all requests take {num_bytes >> 20} MiB of memory")

    def _count(self, image: DecodedImage) -> int:
        """Add the inputs of an image to ``num_live_bytes`` until they are freed. Return their size in bytes."""
        arrays = list((image.inputs or {}).values())
        for array in arrays:
            self._counts.append(array.nbytes)
            weakref.finalize(array, self._counts.append, -array.nbytes)
        return sum(array.nbytes for array in arrays)

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


class _Work:
    """Work on the images of one request, in one or more turns.

    In a turn, a fork decodes one image after another. The turn and the fork end if a request that has used less CPU
    time waits. The request's next turn starts a new fork.
    """

    def __init__(self, connect: Callable[[], socket.socket], turns: FairQueue) -> None:
        self._connect, self._turns = connect, turns
        self._channel: socket.socket | None = None  # during a turn
        self._used = 0.0  # CPU time of this request in seconds
        self._time: float | None = None  # time of this request in ``FairQueue``; None before the first turn

    def decode(self, index: int, data: bytes, detail: str, max_tokens: int) -> DecodedImage:
        """Decode an image. Wait for a turn if necessary.

        Args:
            index: index of the image in the request, for errors.
            data: content of the file.
            detail: ``high`` or ``low``.
            max_tokens: maximum number of tokens. An image with more tokens has no ``inputs``.

        Raises:
            ImageError: the image cannot be used.
            OverloadedError: no process can be started.
            Cancelled: the request was cancelled.
        """
        channel = self._turn()
        asked = {"detail": detail, "max_tokens": max_tokens, "seconds": REQUEST_CPU_SECONDS - self._used}
        with contextlib.suppress(OSError):  # if the process has ended, the answer is missing
            channel.sendall(framed(json.dumps(asked).encode()))
            channel.sendall(LENGTH.pack(len(data)))  # framed() would copy the file
            channel.sendall(data)
        message = receive_patiently(channel)
        if message is None:
            raise ImageError(index, _TOO_MUCH)
        if not message.startswith(b"{"):  # the process could not fork
            raise OverloadedError(f"images {message.decode()}")
        answer = json.loads(message)
        if "error" in answer:
            raise ImageError(index, f" {answer['error']}")
        self._used += answer["seconds"]
        assert self._time is not None
        self._time += answer["seconds"]
        grid, num_tokens = tuple(answer["grid"]), answer["num_tokens"]
        if "hash" not in answer:
            return DecodedImage(grid, num_tokens)
        arrays = {}
        for name, kind, shape in answer["arrays"]:
            arrays[name] = np.empty(shape, kind)  # not filled: zeros for 30 MB would hold the GIL for long
            if not receive_into(arrays[name].reshape(-1).view(np.uint8).data, channel):
                raise ImageError(index, _TOO_MUCH)
        return DecodedImage(grid, num_tokens, arrays, bytes.fromhex(answer["hash"]))

    def _turn(self) -> socket.socket:
        """Return the socket to this request's fork. Wait for a turn first if there is none, or if the turn is over."""
        if self._channel is not None and self._time is not None and self._turns.is_over(self._time):
            self.close()
        if self._channel is None:
            self._time = self._turns.begin(self._time)
            try:
                self._channel = self._connect()
            except BaseException:
                self._turns.end()
                raise
        return self._channel

    def close(self) -> None:
        """End the request's turn, and end the fork that decodes its images. No effect outside a turn."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
            self._turns.end()


def check_size(index: int, sizes: Mapping[bytes, int]) -> None:
    """Raise ImageError for the image at ``index`` if the inputs of the images so far have over ``MAX_INPUT_BYTES``.

    Args:
        index: index of the last image.
        sizes: size of the inputs in bytes, by content hash. Equal images count once.
    """
    if sum(sizes.values()) > MAX_INPUT_BYTES:
        raise ImageError(index, f" and the images before it have more than {MAX_INPUT_BYTES >> 20} MiB of pixels")
