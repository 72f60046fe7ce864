"""Image files for tests: harmless ones, and hostile ones of few bytes."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from functools import cache
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    """Return an RGB image of random blocks, which differs for each seed."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (max(height // 8, 1), max(width // 8, 1), 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the image as a file."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_file(width: int, height: int, bits: int, color_type: int, packed: bytes, *before: bytes) -> bytes:
    """Return a PNG file. ``packed`` has the compressed rows, and ``before`` the chunks between header and pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0))
    pixels = png_chunk(b"IDAT", packed) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + pixels


def png(width: int, height: int, *, bits: int = 1, channels: int = 1) -> bytes:
    """Return a PNG file of zeros. Its pixels are compressed row by row, so that large ones can be made, too."""
    packer, row = zlib.compressobj(9), bytes(1 + (width * bits * channels + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png_file(width, height, bits, {1: 0, 3: 2}[channels], pixels)


def png_of(values: np.ndarray, bits: int, color_type: int, *before: bytes) -> bytes:
    """Return a PNG file of integer values of ``bits`` bits, [height, width, channels]."""
    height, width, _ = values.shape
    digits = values.reshape(height, -1, 1) >> np.arange(bits - 1, -1, -1) & 1
    rows = np.packbits(digits.reshape(height, -1).astype(np.uint8), axis=1)
    return png_file(
        width, height, bits, color_type, zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)), *before
    )


def bomb() -> bytes:
    """Return a PNG file of 21 kB that becomes 169 megapixels."""
    return png(13_000, 13_000)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"


@cache
def hostile_files() -> dict[str, tuple[bytes, str]]:
    """Return files that are refused, by name, each with a part of the message."""
    photo = encoded(picture(640, 480), "JPEG")
    return {
        "bomb": (bomb(), "13000 x 13000 pixels"),
        "larger bomb": (png(20_000, 20_000), "pixels"),
        "line": (png(60_000, 1), "60000 x 1"),
        "truncated JPEG": (photo[: len(photo) // 2], "truncated"),
        "truncated PNG": (encoded(picture(640, 480))[:1500], "truncated"),
        "header only": (png(64, 48)[:33], "broken"),
        "SVG": (SVG, "is not a PNG, JPEG, WebP or GIF image"),
        "EPS": (EPS, "is not a PNG"),
        "TIFF": (encoded(picture(), "TIFF"), "is not a PNG"),
        "text": (b"hello", "is not a PNG"),
        "no palette": (png_file(8, 8, 8, 3, zlib.compress(bytes(72))), "broken"),
        "palette that is too short": (
            png_of(np.full((8, 8, 1), 9), 8, 3, png_chunk(b"PLTE", bytes(3)), png_chunk(b"tRNS", bytes(300))),
            "broken",
        ),
        "transparency without pixels": (
            png(64, 48)[:33] + png_chunk(b"tRNS", bytes(2)) + png_chunk(b"IEND", b""),
            "broken",
        ),
        "broken header": (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "broken"),
    }
