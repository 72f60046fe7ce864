"""Image files of requests: base64 data, URLs, and paths for local callers."""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from metal_engine.cancellation import check_cancelled
from metal_engine.errors import short
from metal_engine.local_paths import local_path
from metal_engine.media.fetch import FetchError, fetch
from metal_engine.media.limits import MAX_FILE_BYTES

Detail = Literal["high", "low"]

# Start of a data URL: the media type, parameters, and base64 as the encoding.
_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
# Maximum length of the start of a data URL. A search in megabytes would hold the GIL for seconds.
_MAX_START = 1024
# Number of characters decoded in one call, which holds the GIL for 1 ms. A multiple of 4.
_CHARACTERS_AT_ONCE = 1 << 18
_SPACE = b" \t\r\n"


class SourceError(ValueError):
    """An image whose file cannot be read.

    The message is a text to append to the path of the image in the request. It begins with a space or a colon.
    """


@dataclass(frozen=True)
class ImageSource:
    """Image of a request whose file has not been read.

    Attributes:
        url: a ``data:``, ``http:`` or ``https:`` URL; for local callers also a path or a ``file:`` URL.
        place: path of the field in the request for error messages, e.g. ``messages[0].content[1]``.
        detail: ``low`` for fewer tokens.
        is_base64: True if ``url`` is base64 data without the start of a data URL.
    """

    url: str
    place: str
    detail: Detail = "high"
    is_base64: bool = False

    @property
    def is_download(self) -> bool:
        """True if the file comes from another server."""
        return not self.is_base64 and self.url[:8].lower().startswith(("http://", "https://"))

    def read(self, allowed_domains: Sequence[str], *, allows_files: bool = False) -> bytes:
        """Return the content of the file.

        Args:
            allowed_domains: hosts from which files may be downloaded.
            allows_files: True to read files on this machine.

        Raises:
            SourceError: the data cannot be decoded, or the file cannot be downloaded or read.
            Cancelled: the request was cancelled.
        """
        if self.is_base64:
            return decode_base64(self.url)
        if self.url[:5].lower() == "data:":
            match = _DATA_URL.match(self.url, 0, _MAX_START)
            if match is None:
                raise SourceError(" must be a data URL with base64, as in data:image/png;base64,iVBOR...")
            return decode_base64(self.url, match.end())
        if self.is_download:
            try:
                return fetch(self.url, allowed_domains)
            except FetchError as error:
                raise SourceError(f": {error}") from error
        if allows_files:
            return _read_file(self.url)
        others = ", or an http or https URL" if allowed_domains else ""
        raise SourceError(f" must be a data URL, as in data:image/png;base64,iVBOR...{others}")


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode base64 text from character ``start`` on. White space is ignored, and padding may be missing.

    Raises:
        SourceError: the text is not base64 or is empty, or the file is too large.
        Cancelled: the request was cancelled.
    """
    if (len(text) - start) * 3 // 4 > MAX_FILE_BYTES + 4:
        raise SourceError(f" has more than {MAX_FILE_BYTES >> 20} MiB")
    pieces, rest, is_padded = [], b"", False
    try:
        for begin in range(start, len(text), _CHARACTERS_AT_ONCE):
            check_cancelled()
            given = rest + text[begin : begin + _CHARACTERS_AT_ONCE].encode("ascii").translate(None, _SPACE)
            if is_padded and given:
                raise SourceError(" is not valid base64: data follows the padding")
            num_whole = len(given) // 4 * 4
            if begin + _CHARACTERS_AT_ONCE < len(text):
                given, rest = given[:num_whole], given[num_whole:]
                is_padded |= given.endswith(b"=")
            elif len(given) % 4 and b"=" not in given:
                given += b"=" * (-len(given) % 4)  # some clients leave out the padding
            pieces.append(binascii.a2b_base64(given, strict_mode=True))
    except (binascii.Error, UnicodeEncodeError) as error:
        raise SourceError(" is not valid base64") from error
    data = b"".join(pieces)
    if not data:
        raise SourceError(" is empty")
    return data


def _read_file(name: str) -> bytes:
    try:
        path = _path(name)
        if not path.is_file():
            raise SourceError(f": {path} is not a file" if path.exists() else f": cannot read {path}: No such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SourceError(f": {path} has more than {MAX_FILE_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f": cannot read {name}: {error.strerror}") from error


def _path(name: str) -> Path:
    """Return the path that a local caller gave as a path or as a ``file:`` URL. Expands ``~`` in a path.

    Raises:
        SourceError: the URL names another host, or the path contains a null character.
    """
    if name[:5].lower() == "file:":
        host, slash, rest = name[5:].removeprefix("//").partition("/")
        if host.lower() not in ("", "localhost"):
            raise SourceError(f": a file URL must be file:///PATH; files of the host {short(host)} cannot be read")
        path = Path(unquote(slash + rest))
    else:
        path = local_path(name)
    if "\0" in str(path):
        raise SourceError(" contains a null character")
    return path
