"""Image files of requests: base64, URLs and paths."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from metal_engine.media import sources
from metal_engine.media.limits import MAX_FILE_BYTES
from metal_engine.media.sources import ImageSource, SourceError, decode_base64


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100, 101, 102])
def test_base64_is_decoded_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(i * 7 % 256 for i in range(size))
    text = base64.b64encode(data).decode()
    for at_once in (4, 8, 1 << 20):
        monkeypatch.setattr(sources, "_CHARACTERS_AT_ONCE", at_once)
        assert decode_base64(text) == data
        assert decode_base64(text.rstrip("=")) == data
        assert decode_base64("\r\n".join(text[i : i + 5] for i in range(0, len(text), 5))) == data
        assert decode_base64("x," + text, 2) == data
        assert ImageSource(f"data:image/png;base64,{text}", "").read(()) == data
        assert ImageSource(text, "", is_base64=True).read(()) == data


@pytest.mark.parametrize("text", ["a", "ab!=", "äbcd", "abcd=efg", "ab==abcd", "abcde", "", "===="])
def test_wrong_base64_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for at_once in (4, 1 << 20):
        monkeypatch.setattr(sources, "_CHARACTERS_AT_ONCE", at_once)
        with pytest.raises(SourceError, match=r"base64|empty"):
            decode_base64(text)


@pytest.mark.parametrize("url", [
    *("", "picture.png", "file:///etc/passwd", "data:image/png,abc", "data:;utf8,<svg/>", "ftp://a/b", "javascript:1"),
    f"data:{';a=b' * 400};base64,aGk=",
])  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    for allowed in (("a",), ()):
        with pytest.raises(SourceError, match="data URL") as caught:
            ImageSource(url, "").read(allowed)
        assert ("or an http or https URL" in str(caught.value)) == (bool(allowed) and not url.startswith("data:"))


def test_media_types_have_no_effect() -> None:
    for start in ("data:image/png;base64,", "data:;base64,", "DATA:image/svg+xml;charset=utf-8;BASE64,"):
        assert ImageSource(f"{start}aGk=", "").read(()) == b"hi"


def test_files_are_read_for_local_callers(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"hi")
    spaced = tmp_path / "ein Bär 100%#?.png"
    spaced.write_bytes(b"hi")
    urls = [f"file://{path}", f"FILE://localhost{path}", f"file:{path}", spaced.as_uri()]
    for name in (str(path), str(spaced), *urls):
        assert ImageSource(name, "").read((), allows_files=True) == b"hi", name
    for name, problem in (
        (str(tmp_path / "b"), "No such file"),
        (str(tmp_path), "is not a file"),
        ("/dev/zero", "is not a file"),
        ("~nobody_has_this_name/a.png", "No such file"),
        (f"file://example.org{path}", "files of the host 'example.org' cannot be read"),
        ("file:///a%00.png", "null character"),
    ):
        with pytest.raises(SourceError, match=problem):
            ImageSource(name, "").read((), allows_files=True)
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(SourceError, match="20 MiB"):
        ImageSource(str(path), "").read((), allows_files=True)


def test_large_data_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(SourceError, match="20 MiB"):
        decode_base64("A" * (MAX_FILE_BYTES * 4 // 3 + 100))
