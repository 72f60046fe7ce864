"""Opens image files: PNG, JPEG, WebP and GIF. Runs in a process of its own, because files are hostile."""

from __future__ import annotations

import io
import math
import warnings

from PIL import Image, UnidentifiedImageError

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
# 8-bit values of 16-bit gray values.
_EIGHT_BITS = [round(value / 257) for value in range(1 << 16)]


class ImageFileError(ValueError):
    """A file that is not a usable image. The message describes the fault."""


def open_image(data: bytes) -> Image.Image:
    """Read the header of an image file and check it. Decodes no pixels.

    Raises:
        ImageFileError: the file is not an image of a known format, or the image is too large.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own limit of pixels is lower
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise ImageFileError("is not a PNG, JPEG, WebP or GIF image, or its header is broken") from error
    except Image.DecompressionBombError as error:
        raise ImageFileError(f"has more than {MAX_PIXELS} pixels") from error
    except (OSError, SyntaxError, ValueError) as error:
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

    Raises:
        ImageFileError: the file is truncated or broken.
    """
    orientation, factor = _orientation(image), _reduction(image.size)
    try:
        image.load()  # the first frame of an animation
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise ImageFileError(f"is truncated or broken: {error}") from error
    image = _on_white(image)
    if factor > 1:
        image = image.reduce(factor)
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit gray, which Pillow would clip to 255
        return image.convert("I").point(_EIGHT_BITS, "L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


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
