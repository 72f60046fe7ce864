"""Random images for benchmark requests, as data URLs of PNG files. Needs no image library."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

# Side of a square of one color in pixels. Noise of single pixels would make files of several megabytes.
_SQUARE = 16


def random_images(rng: np.random.Generator, num_images: int, width: int, height: int) -> tuple[str, ...]:
    """Return data URLs of random RGB images, of ``width`` times ``height`` pixels each."""
    return tuple(_random_image(rng, width, height) for _ in range(num_images))


def _random_image(rng: np.random.Generator, width: int, height: int) -> str:
    colors = rng.integers(0, 256, (-(-height // _SQUARE), -(-width // _SQUARE), 3), dtype=np.uint8)
    pixels = colors.repeat(_SQUARE, axis=0).repeat(_SQUARE, axis=1)[:height, :width]
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # byte 0 of a row is its filter; 0: no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
