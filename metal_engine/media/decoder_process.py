"""Processes that decode images: one that has loaded the image processor, and forks of it for the images of requests.

Image files are hostile: a few kilobytes can become gigabytes of pixels, and decoders have faults. In a process of its
own, a file delays no other request, and its memory is freed with the process. The limits are in
:mod:`metal_engine.media.limits`. The kernel ends a process that exceeds the CPU time for an image. A thread checks the
growth. A process ends when its socket is closed.

For each image, the parent sends two messages. The first message is JSON: ``detail``, the maximum number of tokens
(an image with more tokens is not decoded), and the remaining CPU time in seconds. The second message is the file.

The answer is JSON: the grid, the number of tokens, and the used CPU time in seconds. For a decoded image, the answer
also has the content hash and the names, types and shapes of the encoder's inputs. One message for each input follows.
For an unusable image, the answer has an error message and the used CPU time.

Run as a module: ``python -m metal_engine.media.decoder_process FD``. Loads no MLX.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from metal_engine.forks.channel import LENGTH, framed, receive
from metal_engine.forks.limits import Growth, Monitor
from metal_engine.forks.serving import serve_forks
from metal_engine.media.families.base import Grid, ImageProcessorFamily
from metal_engine.media.families.find import find_family
from metal_engine.media.image_decoding import ImageFileError, decoded, displayed_size, open_image
from metal_engine.media.limits import IMAGE_CPU_SECONDS, LOW_DETAIL_TOKENS, MAX_GROWTH
from metal_engine.python_process import channel_to_parent
from metal_engine.settings.config import VisionConfig

# Size of an image that is processed at the start, to load what the first request would load.
_WARM_UP = (64, 48)


class _Refused(Exception):
    """An image that cannot be used."""


def serve_images(channel: socket.socket, families: dict[str, ImageProcessorFamily]) -> None:
    """Process images received from a socket until the socket is closed. This then raises EOFError.

    Args:
        channel: the socket.
        families: image processing for each value of ``detail``.
    """
    gc.freeze()  # a garbage collection would copy the parent's pages
    Monitor(channel, Growth(), MAX_GROWTH).start()
    while True:
        asked = json.loads(receive(channel))
        data = receive(channel)
        started = time.process_time()
        arrays: dict[str, np.ndarray] = {}
        try:
            with _limited(asked["seconds"]):
                answer, arrays = _work(families[asked["detail"]], data, asked["max_tokens"])
        except _Refused as refused:
            answer = {"error": str(refused)}
        answer["seconds"] = time.process_time() - started
        channel.sendall(framed(json.dumps(answer).encode()))
        for array in arrays.values():
            channel.sendall(LENGTH.pack(array.nbytes))
            channel.sendall(array.data.cast("B"))


def _work(family: ImageProcessorFamily, data: bytes, max_tokens: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the answer for an image, and the arrays that follow the answer.

    Raises:
        _Refused: the image is too narrow.
        Exception: the file is not a usable image, or the image processor fails. The type varies.
    """
    image = open_image(data)
    width, height = displayed_size(image)
    grid: Grid = tuple(map(int, family.grid(width, height)))
    num_tokens = family.num_tokens(grid)
    if not 0 < num_tokens <= family.most_tokens:  # processors reduce one side to nothing, or not far enough
        raise _Refused(f"has {width} x {height} pixels: it is too narrow for the model's image processor")
    answer: dict[str, Any] = {"grid": grid, "num_tokens": num_tokens}
    if num_tokens > max_tokens:
        return answer, {}
    found, inputs = family.inputs(decoded(image))
    if found != grid:
        raise RuntimeError(f"the image processor made the grid {found} instead of {grid}")
    arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    answer["arrays"] = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    answer["hash"] = _content_hash(grid, arrays)
    return answer, arrays


def _content_hash(grid: Grid, arrays: dict[str, np.ndarray]) -> str:
    """Return a hash of the grid and the encoder's inputs, as hexadecimal digits. Equal hashes mean equal features."""
    described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    hasher = hashlib.sha256(json.dumps([grid, described]).encode())
    for array in arrays.values():
        hasher.update(array.data.cast("B"))
    return hasher.hexdigest()


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit the CPU time of the work on an image, and convert exceptions to :class:`_Refused`, except MemoryError.

    The kernel ends the process when the time is used up.

    Args:
        seconds: remaining CPU time of the request in seconds. The limit is at most ``IMAGE_CPU_SECONDS``.
    """
    signal.setitimer(signal.ITIMER_PROF, max(min(IMAGE_CPU_SECONDS, seconds), 1e-3))
    try:
        yield
    except ImageFileError as error:
        raise _Refused(str(error)) from error
    except (_Refused, MemoryError):
        raise
    except Exception as error:  # processors raise many types
        problem = error if isinstance(error, ValueError) else repr(error)
        raise _Refused(f"is refused by the model's image processor: {problem}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(control: socket.socket) -> None:
    """Receive a configuration from ``control``, load its image processor, and fork for each socket received afterwards.

    Reports over ``control`` that the process is ready, or that the image processor cannot be used.
    """
    from PIL import Image

    try:
        vision = msgspec.json.decode(receive(control), type=VisionConfig)
        most = vision.max_image_tokens
        low = LOW_DETAIL_TOKENS if most is None else min(most, LOW_DETAIL_TOKENS)
        families = {"high": find_family(vision, most), "low": find_family(vision, low)}
        for family in families.values():
            family.inputs(Image.new("RGB", _WARM_UP))
    except Exception as error:  # noqa: BLE001  (the configuration is the checkpoint's)
        control.sendall(framed(f"the model's image processor cannot be used: {error!r}".encode()))
        return
    serve_forks(control, lambda channel: serve_images(channel, families))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        main(channel_to_parent())
