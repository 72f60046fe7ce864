"""Image files of requests: base64, URLs, paths, and downloads, which reach only allowed hosts and are bounded."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest

from metal_engine.media import fetch as module
from metal_engine.media import sources
from metal_engine.media.fetch import FetchError, fetch
from metal_engine.media.image_preparer import ImagePreparer
from metal_engine.media.limits import MAX_FILE_BYTES
from metal_engine.media.local_messages import insert_images, split_images
from metal_engine.media.sources import ImageSource, SourceError, decode_base64
from tests.support.image_files import encoded, picture
from tests.support.image_serving import IMAGE, VISION, seeing_config, seeing_tokenizer, shared_decoder
from tests.support.tls import certificate
from tools.fixtures.fake_engine import fake_config

HOST = "localhost"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for i in range(1000):
                time.sleep(0.02)
                self.wfile.write(b"X-Header-%d: 1\r\n" % i)
            return
        target = {"/other": "http://example.org/", "/again": "/again", "/file": "file:///etc/passwd", "/to": "/a?b=c"}
        port = self.server.server_address[1]
        target |= {"/there": f"http://127.0.0.1:{port}/a?b=c", "/private": f"http://127.0.0.2:{port}/a"}
        if self.path in target:
            self.send_response(302)
            self.send_header("Location", target[self.path])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        size = {"/large": 10**9, "/short": 10}.get(self.path)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.path == "/endless":
            while True:
                self.wfile.write(bytes(1 << 16))
        self.wfile.write((self.headers["Host"] if self.path == "/host" else self.path).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer((HOST, 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let downloads reach addresses of this machine."""
    monkeypatch.setattr(module, "is_public", lambda address: True)


@pytest.mark.usefixtures("anywhere")
def test_files_are_downloaded(url: str) -> None:
    assert fetch(f"{url}/a?b=c", [HOST]) == b"/a?b=c"
    assert fetch(f"{url}/to#part", ["other", "LOCALHOST"]) == b"/a?b=c"


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("path", "problem"), [
    ("/none", "status 404"),
    ("/other", "example.org is not one of --allowed-media-domains"),
    ("/file", "is not an http or https URL"),
    ("/again", "redirects"),
    ("/large", "20 MiB"),
    ("/endless", "20 MiB"),
    ("/short", "incomplete|IncompleteRead"),
    ("/a b", "escaped"),
])  # fmt: skip
def test_failures_are_reported(url: str, path: str, problem: str) -> None:
    with pytest.raises(FetchError, match=problem):
        fetch(url + path, [HOST])


@pytest.mark.usefixtures("anywhere")
def test_a_slow_answer_is_cut(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(FetchError):
        fetch(f"{url}/slow", [HOST])
    assert time.monotonic() - started < 10


@pytest.mark.usefixtures("anywhere")
def test_without_threads_the_connection_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = []
    connect = module._connect

    def recorded(*args: Any) -> Any:
        connection, sock = connect(*args)
        sockets.append(sock)
        monkeypatch.setattr(threading.Thread, "start", refused)
        return connection, sock

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_connect", recorded)
    with pytest.raises(FetchError, match="can't start new thread"):
        fetch(f"{url}/a", [HOST])
    assert [sock.fileno() for sock in sockets] == [-1]


def test_each_host_of_a_redirect_is_checked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_public", lambda address: address != "127.0.0.2")
    allowed = [HOST, "127.0.0.1", "127.0.0.2"]
    assert fetch(f"{url}/there", allowed) == b"/a?b=c"
    with pytest.raises(FetchError, match=r"127.0.0.2 has an address that is not public"):
        fetch(f"{url}/private", allowed)


def test_a_hanging_host_name_resolver_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names beyond the limit are refused at once, until a resolver's thread ends."""
    hangs, slots = threading.Event(), threading.BoundedSemaphore(2)
    monkeypatch.setattr(module, "_SECONDS", 0.05)
    monkeypatch.setattr(module, "_resolving", slots)
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: hangs.wait(60) and [])
    try:
        for problem in ("takes more than 0.05 s", "takes more than 0.05 s", "host names are being resolved"):
            with pytest.raises(FetchError, match=problem):
                fetch(f"http://{HOST}/", [HOST])
    finally:
        hangs.set()
        assert all(slots.acquire(timeout=60) for _ in range(2))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
def test_a_handshake_without_end_is_cut(drips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    ended = threading.Event()
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 KiB follows
                while not ended.wait(0.02):
                    peer.sendall(b"\0" * drips)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(FetchError):
                fetch(f"https://{HOST}:{listener.getsockname()[1]}/", [HOST])
            assert not ended.is_set()
        finally:
            ended.set()
            thread.join()


@pytest.mark.usefixtures("anywhere")
def test_files_are_downloaded_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    server = ThreadingHTTPServer((HOST, 0), _Handler)
    monkeypatch.setattr(server, "handle_error", lambda *_: None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert fetch(f"https://{HOST}:{server.server_port}/to", [HOST]) == b"/a?b=c"
        with monkeypatch.context() as patch:
            patch.setattr(module, "_resolved", lambda *_: [("127.0.0.1", server.server_port)])
            assert fetch(f"https://{HOST}/host", [HOST]) == HOST.encode()
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(FetchError, match="certificate"):
            fetch(f"https://{HOST}:{server.server_port}/to", [HOST])
        # Python without certificates of its own.
        monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None, capath=None))
        monkeypatch.setattr(certifi, "where", lambda: str(cert))
        assert fetch(f"https://{HOST}:{server.server_port}/to", [HOST]) == b"/a?b=c"
    finally:
        server.shutdown()
        server.server_close()


def test_private_addresses_are_refused(url: str) -> None:
    with pytest.raises(FetchError, match="not public"):
        fetch(f"{url}/a", [HOST])
    with pytest.raises(FetchError, match="data URL"):  # nothing is downloaded by default
        fetch(url, [])


@pytest.mark.parametrize(("url", "problem"), [
    ("http://example.org/a", "is not one of"),
    ("http://localhost.example.org/", "is not one of"),
    ("http://localhost@example.org/", "user name"),
    ("http://user:password@localhost/", "user name"),
    ("http:///a", "is not an http"),
    (f"http://localhost/{'a' * 10_000}", "more than 8192 characters"),
    ("http://localhost:99999/", "downloaded"),
])  # fmt: skip
def test_urls_are_checked(url: str, problem: str) -> None:
    with pytest.raises(FetchError, match=problem):
        fetch(url, [HOST])


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "::1", "fe80::1%eth0"),
    *("fd00::1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "224.0.0.1", "fec0::1", "::10.0.0.1", "64:ff9b:1::10.0.0.1"),
    *("2002:a00:1::", "ff0e::1"),
]


def test_public_addresses() -> None:
    for address in ("8.8.8.8", "2606:4700::1111", "64:ff9b::8.8.8.8"):
        assert module.is_public(address), address
    assert [address for address in PRIVATE if module.is_public(address)] == []


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100, 101, 102])
def test_base64_is_decoded_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(i * 7 % 256 for i in range(size))
    text = base64.b64encode(data).decode()
    for at_once in (4, 8, 1 << 20):
        monkeypatch.setattr(sources, "_CHARACTERS_AT_ONCE", at_once)
        assert decode_base64(text) == data
        assert decode_base64(text.rstrip("=")) == data
        assert decode_base64("\r\n".join(text[i : i + 5] for i in range(0, len(text), 5))) == data
        assert decode_base64("x," + text + "\r\n  \r\n", 2) == data
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


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "PATH", "detail": "high"}},
    {"type": "image_url", "image_url": "PATH"},
    {"type": "image", "image": "PATH"},
    {"type": "image", "path": "PATH"},
    {"type": "image", "url": "file://PATH"},
])  # fmt: skip
def test_files_are_inserted(part: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(64, 48)))
    given: dict[str, Any] = {
        name: value.replace("PATH", str(path)) if isinstance(value, str) else {**value, "url": str(path)}
        for name, value in part.items()
    }
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, given]}, {"role": "user", "content": "a"}]
    found, sources = split_images(messages)
    assert found[0]["content"][1] == {"type": "image"} and found[1] is messages[1]
    tokenizer = seeing_tokenizer()
    preparer = ImagePreparer(VISION, lambda text: tokenizer.encode(text, add_special_tokens=False))
    preparer._decoder = shared_decoder()
    prompt = tokenizer.apply_chat_template(found)
    ids, images = insert_images(preparer, prompt, sources, seeing_config())
    assert images is not None and ids.count(IMAGE) == images.num_features == 48
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\] is not a PNG"):
        insert_images(preparer, prompt, sources, seeing_config())


def test_other_parts_have_no_image() -> None:
    for part in ({"type": "image"}, {"type": "image_url", "image_url": {}}, {"type": "image", "image": 5}):
        with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\] has no image"):
            split_images([{"role": "user", "content": [part]}])
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\]: images are not downloaded here"):
        split_images([{"role": "user", "content": [{"type": "image", "image": "https://a.example/b.png"}]}])


@pytest.mark.parametrize("kind", ["input_audio", "video_url", None])
def test_audio_and_video_are_refused(kind: str | None) -> None:
    content = [{"type": "text", "text": "hear"}, {"type": kind, "input_audio": {"data": "AA=="}}]
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[1\]: content of type .* is not supported"):
        split_images([{"role": "user", "content": content}])


def test_models_without_images_say_so() -> None:
    _, sources = split_images([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
    with pytest.raises(ValueError, match="the model takes text only"):
        insert_images(None, [1], sources, fake_config())
    assert insert_images(None, [1], [], fake_config()) == ([1], None)
