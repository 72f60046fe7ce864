"""Opens image files: PNG, JPEG, WebP and GIF. Runs in a process of its own, because files are hostile."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from functools import reduce

from PIL import Image, ImageChops, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from metal_engine.media.limits import MAX_ASPECT_RATIO, MAX_PIXELS, REDUCED_PIXELS

# Other formats of Pillow start programs, contain further files, or are rare on the web.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# EXIF tag of the orientation, and the operation that each of its values demands. From 5 on, the sides are exchanged.
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Factors that scale gray values of 2 and of 4 bits to 8 bits, by Pillow's names of these modes.
_GRAY_FACTORS = {"L;2": 85, "L;4": 17}
# 8-bit values of 16-bit gray values.
_EIGHT_BITS = [round(value / 257) for value in range(1 << 16)]


class ImageFileError(ValueError):
    """Raised for a file that is not a usable image. The message continues a sentence, e.g. "is truncated or broken"."""


def open_image(data: bytes) -> Image.Image:
    """Read the header of an image file and check it. Decodes no pixels.

    Raises:
        ImageFileError: the file is not an image of a known format, or the image is too large.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own limit of pixels is lower
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if isinstance(image, PngImageFile) and "transparency" in image.info:
            factor = _GRAY_FACTORS.get(str(image.tile[0].args))
            if factor is not None:
                image.info["transparency"] *= factor  # Pillow scales the pixels only
    except UnidentifiedImageError as error:
        raise ImageFileError("is not a PNG, JPEG, WebP or GIF image, or its header is broken") from error
    except Image.DecompressionBombError as error:
        raise ImageFileError(f"has more than {MAX_PIXELS} pixels") from error
    except Exception as error:  # Pillow raises many types
        raise ImageFileError(f"has a broken header: {error}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageFileError(f"has {width} x {height} pixels; the limit is {MAX_PIXELS} pixels")
    if not width or not height or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageFileError(f"has {width} x {height} pixels; the limit of the ratio is {MAX_ASPECT_RATIO}")
    return image


def displayed_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height of the result of :func:`decoded`, without decoding pixels."""
    factor = _reduction(image.size)
    width, height = (math.ceil(side / factor) for side in image.size)
    return (height, width) if _orientation(image) >= 5 else (width, height)


def decoded(image: Image.Image) -> Image.Image:
    """Decode an opened image to RGB, as a viewer displays it on white.

    An image with more than ``REDUCED_PIXELS`` pixels is reduced by a whole factor.

    Raises:
        ImageFileError: the file is truncated or broken.
    """
    orientation, factor = _orientation(image), _reduction(image.size)
    try:
        low = _low_bytes(image)
        shown = _on_white(_loaded(image), low)
    except Exception as error:  # Pillow raises many types
        raise ImageFileError(f"is truncated or broken: {error}") from error
    if factor > 1:
        shown = shown.reduce(factor)
    turn = _TURNS.get(orientation)
    return shown if turn is None else shown.transpose(turn)


def _loaded(image: Image.Image) -> Image.Image:
    """Return an opened image with the pixels of its first frame."""
    if not isinstance(image, WebPImageFile) or getattr(image, "_decoder", None) is None:
        image.load()
        return image
    # Pillow would make two more copies of a WebP image, and keep them with the decoder.
    frame = image._decoder.get_next()
    image._decoder = None
    if frame is None:
        raise EOFError("the first frame is missing")
    return Image.frombuffer(image.rawmode, image.size, frame[0], "raw", image.rawmode, 0, 1)


def _on_white(image: Image.Image, low: Image.Image | None) -> Image.Image:
    """Convert a decoded image to RGB. Transparent pixels show white.

    Args:
        image: image with pixels.
        low: result of :func:`_low_bytes` for the image.
    """
    transparent = image.info.get("transparency")
    if image.mode.startswith("I"):  # 16-bit gray, which Pillow would clip to 255
        table = [255 if value == transparent else eight for value, eight in enumerate(_EIGHT_BITS)]
        return image.convert("I").point(table, "L").convert("RGB")
    if low is not None and transparent is not None:
        high_bytes, low_bytes = zip(*(divmod(value, 256) for value in transparent), strict=True)
        is_transparent = ImageChops.darker(_where(low, low_bytes), _where(image, high_bytes))
        image.paste((255, 255, 255), mask=is_transparent)
        return image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def _low_bytes(image: Image.Image) -> Image.Image | None:
    """Return an image of the low bytes of a 16-bit RGB PNG with a transparent color; None for all other images.

    Pillow drops the low bytes. Without these bytes, colors close to the transparent color would be transparent, too.
    """
    if not isinstance(image, PngImageFile) or "transparency" not in image.info or image.tile[0].args != "RGB;16B":
        return None
    assert isinstance(image.fp, io.BytesIO)
    low = open_image(image.fp.getvalue())
    assert isinstance(low, PngImageFile)
    low.tile = [low.tile[0]._replace(args="RGB;16L")]  # the second byte of each value instead of the first
    low.load()
    return low


def _where(image: Image.Image, values: Sequence[int]) -> Image.Image:
    """Return a mask that is 255 where the bands of an image have these values."""
    bands = zip(image.split(), values, strict=True)
    return reduce(ImageChops.darker, (band.point([255 * (k == value) for k in range(256)]) for band, value in bands))


def _orientation(image: Image.Image) -> int:
    if "exif" not in image.info:  # the parser would decode a PNG file to find an entry after the pixels
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  (Pillow's parser raises many types; viewers ignore a broken entry)
        return 1
    return value if value in _TURNS else 1


def _reduction(size: tuple[int, int]) -> int:
    """Return the whole factor by which both sides are reduced after decoding."""
    return max(1, math.ceil(math.sqrt(size[0] * size[1] / REDUCED_PIXELS)))
