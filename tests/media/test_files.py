"""Image files are decoded as a viewer displays them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from metal_engine.media import files
from metal_engine.media.files import ImageFileError, decoded, displayed_size, open_image
from tests.support.image_files import encoded, hostile_files, picture, png


def opened(data: bytes) -> np.ndarray:
    """Decode a file, and check that its size was known from the header."""
    image = open_image(data)
    size = displayed_size(image)
    result = decoded(image)
    assert (result.mode, result.size) == ("RGB", size)
    return np.asarray(result)


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_exact_formats_give_the_pixels(kind: str) -> None:
    image = picture().quantize(32)
    assert np.array_equal(opened(encoded(image, kind)), np.asarray(image.convert("RGB")))


def test_lossy_formats_give_pillows_pixels() -> None:
    for kind in ("JPEG", "WEBP"):
        data = encoded(picture(), kind)
        assert np.array_equal(opened(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.array_equal(opened(encoded(picture(), "WEBP", lossless=True)), np.asarray(picture()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encoded(picture(64, 32), kind, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)).convert("RGB"))
        assert np.array_equal(opened(data), np.asarray(expected))


def test_transparent_pixels_are_white() -> None:
    alpha = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert (opened(encoded(alpha)) == 255).all()
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 128))
    assert np.abs(opened(encoded(half)).astype(int) - 127).max() <= 1
    gray = Image.new("LA", (8, 8), (0, 0))
    assert (opened(encoded(gray)) == 255).all()
    palette = Image.new("P", (8, 8), 3)
    palette.putpalette([0, 0, 0] * 256)
    for kind in ("PNG", "GIF"):
        assert (opened(encoded(palette, kind, transparency=3)) == 255).all()
        assert (opened(encoded(palette, kind)) == 0).all()


def test_sixteen_bit_gray_is_scaled() -> None:
    values = np.array([[0, 257, 40_000, 65_535]], np.uint16)
    assert opened(encoded(Image.fromarray(values)))[0, :, 0].tolist() == [0, 1, 156, 255]


def test_cmyk_is_converted() -> None:
    data = encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG")
    assert np.abs(opened(data)[0, 0].astype(int) - (0, 255, 255)).max() <= 2


def test_an_animation_shows_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), (k * 40, 0, 0)) for k in range(4)]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encoded(
            frames[1], kind, save_all=True, append_images=frames[2:], **({"lossless": True} if kind == "WEBP" else {})
        )
        assert opened(data)[0, 0].tolist() == [40, 0, 0]


@pytest.mark.parametrize("name", hostile_files())
def test_hostile_files_are_refused(name: str) -> None:
    data, problem = hostile_files()[name]
    with pytest.raises(ImageFileError, match=problem):
        opened(data)


def test_large_images_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "REDUCED_PIXELS", 1 << 10)
    for image in (picture(100, 60), picture(100, 60).convert("P"), picture(100, 60).convert("1")):
        assert opened(encoded(image)).shape == (20, 34, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert opened(encoded(picture(100, 60), exif=exif)).shape == (34, 20, 3)
    assert opened(png(64, 48)).shape == (24, 32, 3)
