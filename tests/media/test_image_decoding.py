"""Image files are decoded as a viewer displays them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from metal_engine.media import image_decoding
from metal_engine.media.image_decoding import ImageFileError, decoded, displayed_size, open_image
from tests.support.image_files import encoded, hostile_files, picture, png, png_chunk, png_of


def opened(data: bytes) -> np.ndarray:
    """Decode a file, and check that its size was known from the header."""
    image = open_image(data)
    size = displayed_size(image)
    result = decoded(image)
    assert (result.mode, result.size) == ("RGB", size)
    return np.asarray(result)


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_lossless_formats_decode_to_the_exact_pixels(kind: str) -> None:
    image = picture().quantize(32)
    assert np.array_equal(opened(encoded(image, kind)), np.asarray(image.convert("RGB")))


def test_lossy_formats_decode_to_the_same_pixels_as_pillow() -> None:
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
    assert (opened(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 0)))) == 255).all()
    assert np.abs(opened(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)))).astype(int) - 127).max() <= 1
    assert (opened(encoded(Image.new("LA", (8, 8), (0, 0)))) == 255).all()
    palette = Image.new("P", (8, 8), 3)
    palette.putpalette([0, 0, 0] * 256)
    for kind in ("PNG", "GIF"):
        assert (opened(encoded(palette, kind, transparency=3)) == 255).all()
        assert (opened(encoded(palette, kind)) == 0).all()


GRAY, RGB, PALETTE, GRAY_ALPHA, RGBA = 0, 2, 3, 4, 6


@pytest.mark.parametrize(("bits", "kind"), [
    *((bits, GRAY) for bits in (1, 2, 4, 8, 16)),
    *((bits, PALETTE) for bits in (1, 2, 4, 8)),
    *((bits, kind) for bits in (8, 16) for kind in (RGB, GRAY_ALPHA, RGBA)),
])  # fmt: skip
def test_every_kind_of_png_is_shown_on_white(bits: int, kind: int) -> None:
    """The reference is computed from the format's definition, in float64. A transparent color must match exactly."""
    rng, most = np.random.default_rng(bits), (1 << bits) - 1
    values = rng.integers(0, most + 1, (16, 16, {RGB: 3, GRAY_ALPHA: 2, RGBA: 4}.get(kind, 1)))
    colors, alpha, chunks = values / most, np.ones((16, 16, 1)), []
    if kind in (GRAY, RGB):
        transparent = values[0, 0]
        # A neighbor is opaque, also if its high bytes agree.
        values[1, :8], values[1, 8:] = transparent, transparent ^ 1
        colors = values / most
        alpha = 1.0 - (values == transparent).all(axis=-1, keepdims=True)
        chunks = [png_chunk(b"tRNS", transparent.astype(">u2").tobytes())]
    elif kind == PALETTE:
        palette, of_color = rng.integers(0, 256, (most + 1, 3), np.uint8), np.arange(most + 1) * 7 % 256
        colors, alpha = palette[values[..., 0]] / 255, of_color[values] / 255
        chunks = [png_chunk(b"PLTE", palette.tobytes()), png_chunk(b"tRNS", of_color.astype(np.uint8).tobytes())]
    else:
        colors, alpha = colors[..., :-1], colors[..., -1:]
    expected = np.broadcast_to(255 * (colors * alpha + 1 - alpha), (16, 16, 3))
    found = opened(png_of(values, bits, kind, *chunks))
    assert np.abs(found - expected).max() <= 2  # Pillow cuts values of 16 bits, and rounds alpha


def test_cmyk_is_converted() -> None:
    data = encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG")
    assert np.abs(opened(data)[0, 0].astype(int) - (0, 255, 255)).max() <= 2


def test_an_animation_shows_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), (k * 40, 0, 0)) for k in range(4)]
    for kind in ("GIF", "PNG", "WEBP"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[1], kind, save_all=True, append_images=frames[2:], **lossless)
        assert opened(data)[0, 0].tolist() == [40, 0, 0]


@pytest.mark.parametrize("name", hostile_files())
def test_hostile_files_are_refused(name: str) -> None:
    data, problem = hostile_files()[name]
    with pytest.raises(ImageFileError, match=problem):
        opened(data)


def test_large_images_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decoding, "REDUCED_PIXELS", 1 << 10)
    for image in (picture(100, 60), picture(100, 60).convert("P"), picture(100, 60).convert("1")):
        assert opened(encoded(image)).shape == (20, 34, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert opened(encoded(picture(100, 60), exif=exif)).shape == (34, 20, 3)
    assert opened(png(64, 48)).shape == (24, 32, 3)
