"""Tests the source of MLX's machine code: planted libraries are not loaded, and a second user can start.

MLX's folder is settled once in a process, so each test runs a fresh Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.device import kernel_folder
from tests.support.sweeps import sweep

ROOT = Path(__file__).parents[2]
STRANGER = 12345
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles no CPU kernels"),
    pytest.mark.skipif(mx.metal.is_available(), reason="MLX compiles no CPU kernels"),
]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")

RUN = """
import json, logging, os, subprocess, sys, tempfile
import mlx.core as mx
from metal_engine.device.compiled import keep_kernels_private
logging.basicConfig(format="%(message)s")
{before}
tempfiles = tempfile.gettempdir()
keep_kernels_private()
keep_kernels_private()
result = mx.compile(lambda x: x * 2 + 1)(mx.array([1.0, 2.0])).tolist()
child = subprocess.run(["sh", "-c", "mktemp -u"], stdout=subprocess.PIPE, text=True).stdout.strip()
print(json.dumps([result, os.environ.get("TEMPDIR"), tempfile.gettempdir() == tempfiles, os.path.dirname(child)]))
"""


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that all users may enter, with our cache and a temporary folder for all users."""
    folder = Path(tempfile.mkdtemp(prefix="kernels-")).resolve()
    folder.chmod(0o755)
    (folder / "cache").mkdir(mode=0o700)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def run(top: Path, before: str = "", **environment: str) -> tuple[dict[str, Any], str]:
    """Run a process. Return its report and its log."""
    inherited = {name: value for name, value in os.environ.items() if name not in kernel_folder._VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("{before}", before)],
        cwd=ROOT,
        env=inherited | {"METAL_ENGINE_CACHE": str(top / "cache")} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = ("result", "TEMPDIR", "same_tempfiles", "childs")
    found = dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert found["result"] == [3.0, 5.0]
    return found, done.stderr


def libraries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.so"))


def plant(folder: Path, found_in: Path) -> list[Path]:
    """Put damaged libraries of another user in place of MLX's libraries. Loading one fails."""
    planted = []
    for library in libraries(found_in):
        path = folder / library.relative_to(found_in)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"planted")
        planted.append(path)
    assert planted
    return planted


def give(folder: Path, user: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)


def test_kernels_go_to_the_cache_and_other_temporary_files_do_not(top: Path) -> None:
    found, logged = run(top)
    assert logged == "" and found["same_tempfiles"] and found["childs"] == "/tmp"
    (folder,) = (top / "cache" / "kernels").iterdir()
    (library,) = libraries(top)
    assert found["TEMPDIR"] == str(folder) and library.is_relative_to(folder)
    for path in (top / "cache" / "kernels", folder):
        assert path.stat().st_mode & 0o777 == 0o700
    before = library.stat()
    found, logged = run(top)
    assert (library.stat(), libraries(top), logged) == (before, [library], "")


def test_a_program_that_has_used_mlx_before(top: Path) -> None:
    """Kernels that the program compiled before stay loaded. Later kernels come from our folder."""
    before = "os.environ['TEMPDIR'] = {!r}; mx.eval(mx.compile(lambda x: x * 3 - 1)(mx.array([1.0])))"
    before += "; del os.environ['TEMPDIR']"
    found, logged = run(top, before.format(str(top / "tmp")))
    assert logged == "" and len(libraries(top / "tmp")) == len(libraries(Path(found["TEMPDIR"]))) == 1
    assert Path(found["TEMPDIR"]).is_relative_to(top / "cache")


def test_the_users_own_temporary_folder_stays(top: Path) -> None:
    """Libraries that MLX has compiled there are loaded again. Only a truncated library is removed."""
    mine = top / "mine"
    mine.mkdir()
    found, logged = run(top, TMPDIR=str(mine))
    assert logged == "" and found["TEMPDIR"] is None and found["childs"] == str(mine)
    assert libraries(top) == libraries(mine / "mlx") and (mine / "mlx").stat().st_mode & 0o777 == 0o700
    (library,) = libraries(mine)
    cut = library.with_name("liba_1.so")
    cut.write_bytes(b"cut short")
    os.utime(cut, (1, 1))
    before = library.stat().st_mtime_ns
    found, logged = run(top, TMPDIR=str(mine))
    assert logged == "" and found["childs"] == str(mine)
    assert libraries(top) == [library] and library.stat().st_mtime_ns == before


@as_root
def test_planted_libraries_are_not_loaded(top: Path) -> None:
    """Another user has created MLX's folder before us, with code in it. MLX alone would load that code."""
    run(top, TMPDIR=str(top))
    shared = top / "tmp"
    plant(shared / "mlx", top / "mlx")
    give(shared / "mlx", STRANGER)
    by_itself = [sys.executable, "-c", "import mlx.core as mx; mx.eval(mx.compile(lambda x: x * 2 + 1)(mx.ones(2)))"]
    done = subprocess.run(by_itself, env={**os.environ, "TMPDIR": str(shared)}, capture_output=True, text=True)
    assert done.returncode != 0 and "file too short" in done.stderr
    _, logged = run(top, TMPDIR=str(shared))
    assert logged.count("belongs to another user (uid 12345) (TMPDIR names another folder)") == 1
    # The same in a folder that belongs to us.
    give(shared / "mlx", os.geteuid())
    for path in libraries(shared):
        os.chown(path, STRANGER, STRANGER)
    _, logged = run(top, TMPDIR=str(shared))
    assert logged.count("so belongs to another user (uid 12345) (TMPDIR names another folder)") == 1


@as_root
def test_a_second_user_can_start(top: Path) -> None:
    """A first user's folder is in the way. MLX alone could not write there."""
    first = top / "tmp" / "mlx"
    (first / mx.__version__ / "cpu").mkdir(parents=True)
    (top / "second").mkdir()
    os.chown(top / "second", STRANGER, STRANGER)
    become = f"os.setresgid({STRANGER}, {STRANGER}, {STRANGER}); os.setresuid({STRANGER}, {STRANGER}, {STRANGER})"
    _, logged = run(top, become, TMPDIR=str(top / "tmp"))
    assert "belongs to another user (uid 0)" in logged and not libraries(first)
    found, logged = run(top, become, METAL_ENGINE_CACHE=str(top / "second"))
    assert logged == "" and Path(found["TEMPDIR"]).is_relative_to(top / "second")


@pytest.mark.parametrize("trouble", ["read-only", "characters", "open", "noexec", "full"])
def test_kernels_go_to_the_temporary_folder_if_the_cache_is_unusable(
    top: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = top / "cache"
    for name in kernel_folder._VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(top / "tmp"))
    of_system = os.statvfs

    def statvfs(path: Path) -> SimpleNamespace:
        real = of_system(path)
        there = path.is_relative_to(cache)
        return SimpleNamespace(
            f_flag=os.ST_NOEXEC if there and trouble == "noexec" else real.f_flag,
            f_bavail=0 if there and trouble == "full" else real.f_bavail,
            f_frsize=real.f_frsize,
        )

    monkeypatch.setattr(os, "statvfs", statvfs)
    if trouble == "read-only":
        cache = cache / "file"
        cache.touch()
    elif trouble == "characters":
        cache = cache / "a$(touch planted)`"
    elif trouble == "open":
        cache.chmod(0o777)
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(cache))
    folder = kernel_folder.use_private_kernel_folder.__wrapped__()
    assert folder == top / "tmp" / f"metal-engine-{os.geteuid()}" / "mlx"
    assert os.environ["TEMPDIR"] == str(folder.parent)
    assert ("not to the cache" in caplog.text and "mode 0777" in caplog.text) == (trouble == "open")


def test_compilation_is_off_with_one_warning_if_no_folder_is_usable(top: Path) -> None:
    (top / "cache").chmod(0o777)
    (top / "tmp" / f"metal-engine-{os.geteuid()}").symlink_to(top / "cache")
    found, logged = run(top, f"tempfile.tempdir = {str(top / 'tmp')!r}")
    (line,) = logged.splitlines()
    assert line.startswith("MLX's compiler is disabled") and "can be written by other users" in line
    assert "METAL_ENGINE_CACHE" in line and found["TEMPDIR"] is None and not libraries(top)


def test_a_library_that_was_cut_short_is_compiled_again(top: Path) -> None:
    found, _ = run(top)
    (library,) = libraries(Path(found["TEMPDIR"]))
    content = library.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1, len(content)):
        library.write_bytes(content[:length])
        kernel_folder._fit_for_code(Path(found["TEMPDIR"]))
        assert library.exists(), "somebody may be writing it"
        os.utime(library, (1, 1))
        kernel_folder._fit_for_code(Path(found["TEMPDIR"]))
        assert library.exists() == (length == len(content))
    library.write_bytes(content[: len(content) // 2])
    os.utime(library, (1, 1))
    run(top)
    assert len(library.read_bytes()) == len(content)


def test_cleanup_removes_only_truncated_libraries_of_mlx(top: Path) -> None:
    folder = top / "cache"
    kernels = folder / "mlx" / mx.__version__ / "cpu"
    others = [
        folder / "liba.so",
        folder / "mlx" / "liba.so",
        kernels.parent / "liba.so",
        kernels / "a.so",
        kernels / "lib.so",
        kernels / "liba.so.1",
        kernels / "deeper" / "liba.so",
        kernels.parent / "gpu" / "liba.so",
        folder / "other" / "1.0" / "cpu" / "liba.so",
    ]
    cut_short = [kernels / "liba_1.so", kernels / "liba_116_ 60a6671b82bf303.so"]
    for path in (*others, *cut_short):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"cut short")
        os.utime(path, (1, 1))
    kernel_folder._fit_for_code(folder)
    assert all(path.exists() for path in others) and not any(path.exists() for path in cut_short)


@pytest.mark.parametrize(
    "other",
    sweep(("notes.txt", "src/deep/down/libother.so", "0.1.0/gpu/liba.so", "0.1.0/cpu/a.so"), lambda o: "gpu" in o),
)
def test_a_folder_named_mlx_with_other_files_is_not_changed(top: Path, other: str) -> None:
    mine = top / "mine"
    path = mine / "mlx" / other
    path.parent.mkdir(parents=True)
    (mine / "mlx").chmod(0o755)
    path.write_bytes(b"mine")
    os.utime(path, (1, 1))
    found, logged = run(top, TMPDIR=str(mine))
    ours = mine / f"metal-engine-{os.geteuid()}"
    assert found["same_tempfiles"] and found["TEMPDIR"] is None and found["childs"] == str(ours)
    assert logged.count("\n") == 1 and f"go to {ours}, to which TMPDIR is now set" in logged
    assert path.read_bytes() == b"mine" and (mine / "mlx").stat().st_mode & 0o777 == 0o755
    (library,) = [path for path in libraries(top) if path.is_relative_to(ours)]
    assert library.parent.parent.parent == ours / "mlx" and ours.stat().st_mode & 0o777 == 0o700
    assert set(mine.rglob("*.so")) <= {path, library}


def test_files_deleted_during_a_folder_scan_are_skipped(tmp_path: Path) -> None:
    """For example, a compiler's temporary file."""
    for i in range(3):
        (tmp_path / f"{i}.tmp").touch()
    found = kernel_folder._contents(tmp_path)
    first, _ = next(found)
    for path in tmp_path.iterdir():
        path.unlink()
    assert first.suffix == ".tmp" and list(found) == []
