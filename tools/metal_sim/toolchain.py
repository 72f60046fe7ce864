"""Finds and runs clang, and stores its output in a cache directory."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from metal_engine.device.private_folder import NotPrivateError, private_folder

from .errors import ToolchainError

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
# Modules that affect compiled code.
CODE = ("build", "check", "ptx", "signature", "source", "toolchain", "trace", "trace_child")
# Older versions lack C++ for OpenCL 2021, which the check pass needs.
OLDEST_CLANG = 16
INSTALL_HINT = (
    "The Metal simulator needs clang 16 or newer. On Debian or Ubuntu: tools/metal_sim/install_clang.sh "
    "(it runs apt-get install clang-16); on a Mac: brew install llvm. "
    "METAL_SIM_CLANG can name another clang++."
)


def _version(clang: str) -> int | None:
    try:
        text = subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"clang version (\d+)", text)
    return int(found[1]) if found else None


@cache
def clang() -> str:
    """Return the path of the clang++ to use.

    Raises:
        ToolchainError: no clang++ is new enough. The message has installation advice.
    """
    given = os.environ.get("METAL_SIM_CLANG")
    candidates = [given] if given else [f"clang++-{v}" for v in range(OLDEST_CLANG, 30)]
    if not given:
        candidates += ["clang++", "/opt/homebrew/opt/llvm/bin/clang++", "/usr/local/opt/llvm/bin/clang++"]
    for name in candidates:
        path = shutil.which(name)
        if path and (_version(path) or 0) >= OLDEST_CLANG:
            return path
    raise ToolchainError(INSTALL_HINT)


@cache
def cache_dir() -> Path:
    """Return the folder of compiled kernels: ``METAL_SIM_CACHE``, or a folder in the user's cache directory.

    Raises:
        ToolchainError: other users could write to the folder or replace it.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("METAL_SIM_CACHE") or users / "metal-sim")
    try:
        return private_folder(path)
    except NotPrivateError as error:
        raise ToolchainError(f"code is not loaded from METAL_SIM_CACHE: {error}") from error


@cache
def fingerprint() -> str:
    """Return a digest that changes with clang, the kind of machine, and every file that affects compiled code."""
    h = hashlib.sha256()
    code = [HERE / f"{n}.py" for n in CODE]
    headers = [path for folder in (INCLUDE, HERE / "cuda", HERE / "runtime") for path in folder.rglob("*")]
    for path in sorted([*headers, *code]):
        if path.is_file():
            h.update(path.name.encode())
            h.update(path.read_bytes())
    h.update(f"{clang()} {_version(clang())} {sys.platform} {platform.machine()}".encode())
    return h.hexdigest()


def key_of(*parts: object) -> str:
    h = hashlib.sha256(fingerprint().encode())
    for part in parts:
        h.update(repr(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:32]


def run_clang(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([clang(), *arguments], capture_output=True, text=True)


def publish(text: str | bytes, path: Path) -> None:
    """Write a file atomically for other processes."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
        f.write(text.encode() if isinstance(text, str) else text)
    os.replace(f.name, path)


@cache
def host_features() -> list[str]:
    """Return flags for hardware conversions of half, if the CPU has them.

    Software conversions give the same results, but slower.
    """
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return ["-mf16c"] if re.search(r"\bf16c\b", flags) else []


@cache
def runtime_library() -> Path:
    """Return the path of the compiled runtime. Builds it at first use. Raises ToolchainError if it does not compile."""
    out = cache_dir() / f"runtime-{key_of('runtime')}.so"
    if out.exists():
        return out
    sources = sorted(str(p) for p in (HERE / "runtime").glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
        made = Path(tmp) / "runtime.so"
        done = run_clang(["-O2", "-std=c++17", "-fPIC", "-shared", *sources, "-o", str(made)])
        if done.returncode:
            raise ToolchainError(f"the simulator's runtime does not compile:\n{done.stderr}")
        os.replace(made, out)
    return out


@cache
def symbolizer() -> list[str]:
    """Return a command that translates addresses to lines, including inlined frames.

    Raises:
        ToolchainError: neither llvm-symbolizer nor addr2line is installed.
    """
    directory = Path(os.path.realpath(clang())).parent
    for name in (directory / "llvm-symbolizer", "llvm-symbolizer", "llvm-symbolizer-16"):
        if path := shutil.which(str(name)):
            return [path, "--output-style=GNU", "--inlines", "--functions=none"]
    if path := shutil.which("addr2line"):
        return [path, "--inlines"]
    raise ToolchainError("no llvm-symbolizer and no addr2line: cannot tell source lines")
