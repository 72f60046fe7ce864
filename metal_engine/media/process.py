"""Processes that decode images: one that has loaded the image processor, and a fork of it for each request.

Image files are hostile: a few kilobytes can become gigabytes of pixels, and decoders have faults. In a process of its
own, a file delays no other request, and its memory is freed with the process. The limits are in
:mod:`metal_engine.media.limits`. The kernel ends a process that exceeds the CPU time for an image or a request. A
thread checks the growth. A process ends when its socket is closed.

A request's first message is JSON: the ``detail`` of each image, the maximum number of tokens of all images, and whether
the inputs of the encoder are needed. One message per file follows. The first answers are JSON, with the grid of each
image and the number of tokens up to it. If inputs are needed and the tokens are within their limit, each image then has
an answer with the names, types and shapes of its arrays, and one message per array. An error with the index of the
image ends the answers.

Run as a module: ``python -m metal_engine.media.process FD``. Loads no MLX.
"""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from metal_engine.forks.channel import LENGTH, framed, receive
from metal_engine.forks.limits import Growth, Monitor
from metal_engine.forks.serving import serve_forks
from metal_engine.media.families.base import Grid, ImageFamily
from metal_engine.media.families.find import find_family
from metal_engine.media.files import ImageFileError, decoded, displayed_size, open_image
from metal_engine.media.limits import (
    IMAGE_CPU_SECONDS,
    LOW_DETAIL_TOKENS,
    MAX_GROWTH,
    MAX_INPUT_BYTES,
    REQUEST_CPU_SECONDS,
)
from metal_engine.settings.config import VisionConfig

# Size of an image that is processed at the start, to load what the first request would load.
_WARM_UP = (64, 48)


class _Refused(Exception):
    """An image that cannot be used."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index


def serve_images(channel: socket.socket, families: dict[str, ImageFamily]) -> None:
    """Process the images of a request, received from a socket."""
    gc.freeze()  # a garbage collection would copy the parent's pages
    Monitor(channel, Growth(), MAX_GROWTH).start()
    asked = json.loads(receive(channel))
    files = [receive(channel) for _ in asked["details"]]
    try:
        _serve(channel, [families[detail] for detail in asked["details"]], files, asked)
    except _Refused as refused:
        channel.sendall(framed(json.dumps({"index": refused.index, "error": str(refused)}).encode()))


def _serve(channel: socket.socket, families: list[ImageFamily], files: list[bytes], asked: dict[str, Any]) -> None:
    grids: list[Grid] = []
    num_tokens = 0
    for i, (family, data) in enumerate(zip(families, files, strict=True)):
        grids.append(_grid(i, family, data))
        num_tokens += family.num_tokens(grids[-1])
        channel.sendall(framed(json.dumps({"grid": grids[-1], "num_tokens": num_tokens}).encode()))
    if not asked["wants_inputs"] or num_tokens > asked["max_tokens"]:
        return
    num_bytes = 0
    for i, (family, data) in enumerate(zip(families, files, strict=True)):
        arrays = _inputs(i, family, data, grids[i])
        num_bytes += sum(array.nbytes for array in arrays.values())
        if num_bytes > MAX_INPUT_BYTES:
            raise _Refused(i, f"and the images before it have more than {MAX_INPUT_BYTES >> 20} MiB of pixels")
        described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        channel.sendall(framed(json.dumps({"arrays": described}).encode()))
        for array in arrays.values():
            channel.sendall(LENGTH.pack(array.nbytes))
            channel.sendall(np.ascontiguousarray(array).data.cast("B"))


@contextlib.contextmanager
def _work_on(index: int) -> Iterator[None]:
    """Limit the CPU time of the work on an image and of this process, and raise errors as :class:`_Refused`."""
    left = max(REQUEST_CPU_SECONDS - time.process_time(), 1e-3)
    signal.setitimer(signal.ITIMER_PROF, min(IMAGE_CPU_SECONDS, left))
    try:
        yield
    except ImageFileError as error:
        raise _Refused(index, str(error)) from error
    except ValueError as error:
        raise _Refused(index, f"is refused by the model's image processor: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _grid(index: int, family: ImageFamily, data: bytes) -> Grid:
    with _work_on(index):
        return tuple(map(int, family.grid(*displayed_size(open_image(data)))))


def _inputs(index: int, family: ImageFamily, data: bytes, grid: Grid) -> dict[str, np.ndarray]:
    with _work_on(index):
        found, arrays = family.inputs(decoded(open_image(data)))
    if found != grid:
        raise RuntimeError(f"the image processor made the grid {found} instead of {grid}")
    return arrays


def main(control: socket.socket) -> None:
    """Load the image processor whose configuration is received from ``control``, then fork for every request."""
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
        main(socket.socket(fileno=int(sys.argv[1])))
